from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from adtrain.data import DataError
from adtrain.data.images import read_image

Image = pytest.importorskip("PIL.Image")
RNG = np.random.default_rng(0)


def save(path: Path, pixels: np.ndarray) -> Path:
    Image.fromarray(pixels).save(path)
    return path


def test_a_grey_png_comes_back_as_it_was(tmp_path: Path) -> None:
    pixels = RNG.integers(0, 256, (4, 5), dtype=np.uint8)
    np.testing.assert_array_equal(read_image(save(tmp_path / "grey.png", pixels), (1, 4, 5)), pixels[np.newaxis])


def test_a_colour_png_comes_back_with_its_channels_first(tmp_path: Path) -> None:
    pixels = RNG.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    found = read_image(save(tmp_path / "colour.png", pixels), (3, 4, 5))
    np.testing.assert_array_equal(found, pixels.transpose(2, 0, 1))
    assert found.flags.c_contiguous


def test_grey_and_colour_are_turned_into_what_the_network_takes(tmp_path: Path) -> None:
    grey = RNG.integers(0, 256, (4, 5), dtype=np.uint8)
    np.testing.assert_array_equal(read_image(save(tmp_path / "grey.png", grey), (3, 4, 5)), np.stack([grey] * 3))
    white = np.full((4, 5, 3), 255, np.uint8)
    assert read_image(save(tmp_path / "white.jpg", white), (1, 4, 5)).tolist() == white[np.newaxis, ..., 0].tolist()


def test_an_opaque_alpha_channel_is_dropped_and_transparency_refused(tmp_path: Path) -> None:
    pixels = np.full((4, 5, 4), 255, np.uint8)
    assert read_image(save(tmp_path / "opaque.png", pixels), (3, 4, 5)).min() == 255
    pixels[0, 0, 3] = 254
    with pytest.raises(DataError, match="found transparent pixels"):
        read_image(save(tmp_path / "clear.png", pixels), (3, 4, 5))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.png", None, "cannot be read .No such file"),
        ("text.png", b"not an image", "found neither a PNG nor a JPEG image"),
        ("empty.jpg", b"", "found neither a PNG nor a JPEG image"),
        ("cut.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "found neither a PNG nor a JPEG image|cannot be read"),
    ],
)
def test_what_is_no_image_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"^{tmp_path / name}: {message}"):
        read_image(tmp_path / name, (1, 4, 5))


def test_a_truncated_image_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "noise.png", RNG.integers(0, 256, (64, 64), dtype=np.uint8))
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(DataError, match="cannot be read"):
        read_image(path, (1, 64, 64))


def test_another_size_is_refused_and_nothing_resized(tmp_path: Path) -> None:
    path = save(tmp_path / "wide.png", np.zeros((4, 6), np.uint8))
    with pytest.raises(DataError, match=r"found an image of 4 x 6 pixels .*, expected 4 x 5; resize it first"):
        read_image(path, (1, 4, 5))


def test_pixels_of_16_bits_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "deep.png", np.full((4, 5), 300, np.uint16))
    with pytest.raises(DataError, match=r"found pixels of kind I.*, expected 8-bit grey or RGB"):
        read_image(path, (1, 4, 5))


def test_a_network_of_other_channels_is_told_to_use_idx(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="an image file has 1 or 3 channels, the network takes 2"):
        read_image(tmp_path / "any.png", (2, 4, 5))


def test_without_pillow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install 'adtrain\[report\]'"):
        read_image(tmp_path / "any.png", (1, 4, 5))
