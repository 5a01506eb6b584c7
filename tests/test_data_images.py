from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from adtrain.data import DataError
from adtrain.data.images import read_image, resized

RNG = np.random.default_rng(0)


def save(path: Path, pixels: np.ndarray) -> Path:
    Image.fromarray(pixels).save(path)
    return path


def test_a_grey_png_is_read_exactly(tmp_path: Path) -> None:
    pixels = RNG.integers(0, 256, (4, 5), dtype=np.uint8)
    np.testing.assert_array_equal(read_image(save(tmp_path / "grey.png", pixels), 1), pixels[np.newaxis])


def test_a_colour_png_is_read_exactly_with_channels_first(tmp_path: Path) -> None:
    pixels = RNG.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    found = read_image(save(tmp_path / "colour.png", pixels), 3)
    np.testing.assert_array_equal(found, pixels.transpose(2, 0, 1))
    assert found.flags.c_contiguous


def test_images_are_converted_to_the_requested_channels(tmp_path: Path) -> None:
    grey = RNG.integers(0, 256, (4, 5), dtype=np.uint8)
    np.testing.assert_array_equal(read_image(save(tmp_path / "grey.png", grey), 3), np.stack([grey] * 3))
    white = np.full((4, 5, 3), 255, np.uint8)
    assert read_image(save(tmp_path / "white.jpg", white), 1).tolist() == white[np.newaxis, ..., 0].tolist()


@pytest.mark.parametrize("suffix", [".jpg", ".png"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_upright_as_its_exif_orientation_says(tmp_path: Path, suffix: str, orientation: int) -> None:
    upright = np.kron([[0, 80], [160, 240], [40, 200]], np.ones((16, 16))).astype(np.uint8)
    stored = upright.T if orientation > 4 else upright
    stored = stored[::-1] if orientation in (3, 4, 6, 7) else stored
    stored = stored[:, ::-1] if orientation in (2, 3, 7, 8) else stored
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    path = tmp_path / f"image{suffix}"
    Image.fromarray(np.ascontiguousarray(stored)).save(path, exif=exif, quality=100)
    np.testing.assert_allclose(read_image(path, 1)[0].astype(int), upright.astype(int), atol=3)
    assert read_image(path).shape == (1, *upright.shape)


def test_an_opaque_alpha_channel_is_dropped_and_transparency_refused(tmp_path: Path) -> None:
    pixels = np.full((4, 5, 4), 255, np.uint8)
    assert read_image(save(tmp_path / "opaque.png", pixels), 3).min() == 255
    pixels[0, 0, 3] = 254
    with pytest.raises(DataError, match="found transparent pixels"):
        read_image(save(tmp_path / "clear.png", pixels), 3)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.png", None, "cannot be read .No such file"),
        ("text.png", b"not an image", "found neither a PNG nor a JPEG image"),
        ("empty.jpg", b"", "found neither a PNG nor a JPEG image"),
        ("cut.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "found neither a PNG nor a JPEG image|cannot be read"),
    ],
)
def test_the_error_of_a_file_that_is_no_image_names_it(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"^{tmp_path / name}: {message}"):
        read_image(tmp_path / name, 1)


def test_a_truncated_image_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "noise.png", RNG.integers(0, 256, (64, 64), dtype=np.uint8))
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(DataError, match="cannot be read"):
        read_image(path, 1)


def test_resizing_averages_the_pixels_that_a_new_pixel_covers() -> None:
    image = RNG.integers(0, 256, (3, 2, 4), dtype=np.uint8)
    np.testing.assert_array_equal(resized(image, 2, 4), image)
    flat = np.full((1, 60, 90), 77, np.uint8)
    np.testing.assert_array_equal(resized(flat, 4, 5), np.full((1, 4, 5), 77))
    halves = np.repeat(np.array([0, 200], np.uint8), 50)[np.newaxis, np.newaxis].repeat(40, axis=1)
    found = resized(halves, 4, 10)
    assert found.shape == (1, 4, 10)
    assert found[0, 0].tolist() == sorted(found[0, 0].tolist())
    assert abs(float(found.mean()) - 100) < 2


@pytest.mark.parametrize("channels", [None, 1, 3])
def test_of_16_bits_the_high_byte_is_kept(tmp_path: Path, channels: int | None) -> None:
    pixels = RNG.integers(0, 1 << 16, (4, 5), dtype=np.uint16)
    found = read_image(save(tmp_path / "deep.png", pixels), channels)
    np.testing.assert_array_equal(found, np.stack([pixels >> 8] * (channels or 1)))
    assert found.dtype == np.uint8


def test_pixels_of_16_bits_that_use_the_low_byte_only_are_refused(tmp_path: Path) -> None:
    black = np.zeros((4, 5), np.uint16)
    assert read_image(save(tmp_path / "black.png", black)).max() == 0
    with pytest.raises(DataError, match=r"found pixels of 16 bits, of at most 255 of 65535: all of them are black; "):
        read_image(save(tmp_path / "low.png", black + np.uint16(255)))


def test_a_palette_is_looked_up(tmp_path: Path) -> None:
    colours = RNG.integers(0, 256, (256, 3), dtype=np.uint8)
    indices = RNG.integers(0, 256, (4, 5), dtype=np.uint8)
    image = Image.fromarray(indices, "L").convert("P")
    image.putdata(indices.ravel().tolist())
    image.putpalette(colours.ravel().tolist())
    image.save(tmp_path / "palette.png")
    np.testing.assert_array_equal(read_image(tmp_path / "palette.png"), colours[indices].transpose(2, 0, 1))


def test_cmyk_becomes_rgb(tmp_path: Path) -> None:
    inks = np.kron(RNG.integers(0, 256, (2, 2, 4)), np.ones((16, 16, 1))).astype(np.uint8)
    Image.fromarray(inks, "CMYK").save(tmp_path / "inks.jpg", quality=100, subsampling=0)
    left = 1 - inks.astype(float) / 255
    expected = 255 * left[..., :3] * left[..., 3:]
    np.testing.assert_allclose(read_image(tmp_path / "inks.jpg").transpose(1, 2, 0), expected, atol=4)


def test_other_numbers_of_channels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="an image file has 1 or 3 channels, the network takes 2"):
        read_image(tmp_path / "any.png", 2)
