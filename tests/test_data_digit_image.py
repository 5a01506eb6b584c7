"""Photographs of digits become images of MNIST's form before a network sees them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from random_networks import with_arrays

from adtrain import data, nn
from adtrain.data import DataError
from adtrain.data.digit_image import centred
from adtrain.training import TrainedModel, inputs
from adtrain.training.inputs import ImageOptions


def photograph(height: int = 30, width: int = 20, top: int = 5, left: int = 50) -> np.ndarray:
    """Dark ink on light paper with noise: a seven of this size at this place, uint8 (1, 90, 120)."""
    ink = np.zeros((90, 120))
    ink[top : top + 4, left : left + width] = 1
    ink[top : top + height, left + width - 4 : left + width] = 1
    paper = np.random.default_rng(0).normal(200, 3, ink.shape)
    pixels: np.ndarray = (paper - 150 * ink).clip(0, 255).astype(np.uint8)[np.newaxis]
    return pixels


@given(height=st.integers(12, 60), width=st.integers(12, 60), top=st.integers(5, 25), left=st.integers(5, 50))
def test_a_digit_of_any_size_and_place_gets_the_form_of_mnist(height: int, width: int, top: int, left: int) -> None:
    found = centred(photograph(height, width, top, left), 28, 28, "x.png").image
    assert found.dtype == np.uint8
    assert (found.shape, int(found.min()), int(found.max())) == ((1, 28, 28), 0, 255)
    rows, columns = (np.flatnonzero(found[0].max(axis=axis)) for axis in (1, 0))
    sides, scale = (np.ptp(rows) + 1, np.ptp(columns) + 1), 20 / max(height, width)
    assert max(sides) == 20
    np.testing.assert_allclose(sides, (scale * height, scale * width), atol=1)
    weights = found[0] / found.sum()
    for axis, positions in ((1, rows), (0, columns)):
        centre = weights.sum(axis=axis) @ np.arange(28)
        at_edge = positions[0] == 0 or positions[-1] == 27
        assert at_edge or abs(centre - 13.5) <= 0.51


def test_an_image_without_a_digit_is_one_line() -> None:
    with pytest.raises(DataError, match=r"^x\.png: found no ink on plain paper, expected a digit; --center no"):
        centred(np.full((1, 40, 40), 90, np.uint8), 28, 28, "x.png")


def written(digit: np.ndarray, size: tuple[int, int], side: int, turned: float = 0) -> np.ndarray:
    """Where the ink of a digit is, in [0, 1]: an image of MNIST with this side, at a third of the free space."""
    image = Image.fromarray(digit).resize((side, side), Image.Resampling.BICUBIC).rotate(turned)
    ink = np.zeros(size)
    top, left = (size[0] - side) // 3, (size[1] - side) // 3
    ink[top : top + side, left : left + side] = np.clip(np.asarray(image) / 255 * 3 - 1, 0, 1)
    return ink


def lit(reflected: np.ndarray, shading: float) -> np.ndarray:
    """A photograph, uint8 (1, H, W), of paper whose right lower corner gets less light by the fraction `shading`."""
    height, width = reflected.shape
    darker = np.add.outer(np.linspace(0, 0.5, height), np.linspace(0, 0.5, width))
    noise = np.random.default_rng(0).normal(0, 3, reflected.shape)
    pixels = 225 * (1 - shading * darker) * reflected + noise
    return pixels.clip(0, 255).astype(np.uint8)[np.newaxis]


def ruled(size: tuple[int, int], slope: float = 0.02) -> np.ndarray:
    """Where the lines of ruled paper are: a tenth of the height apart."""
    rows, columns = np.mgrid[: size[0], : size[1]]
    return ((rows + slope * columns) % (size[0] / 10) < max(2, size[0] / 300)).astype(float)


def likeness(found: np.ndarray, expected: np.ndarray) -> float:
    """The greatest cosine between two images (28, 28), of which one may be moved by a pixel."""
    moved = [np.roll(found, shift, (0, 1)).ravel() / 1.0 for shift in itertools.product((-1, 0, 1), repeat=2)]
    return max(float(x @ expected.ravel() / np.linalg.norm(x) / np.linalg.norm(expected)) for x in moved)


PHOTOGRAPHED = [1, 4, 7, 8]
"""Digits of thin, open and closed forms."""


@pytest.fixture(scope="module")
def digits() -> np.ndarray:
    """One image of each digit of MNIST's test part, uint8 (10, 28, 28)."""
    test = data.load("mnist").test
    return np.stack([test.images[int(np.flatnonzero(test.labels == label)[3])][0] for label in range(10)])


SIZE = (300, 400)


@pytest.mark.parametrize(
    ("shading", "lines", "ink"),
    [(0.0, 0.0, 0.8), (0.7, 0.0, 0.4), (0.3, 0.6, 0.8)],
    ids=["even light", "pencil in shade", "darkly ruled"],
)
def test_a_photographed_digit_has_the_pixels_of_mnist(
    digits: np.ndarray, shading: float, lines: float, ink: float
) -> None:
    for number in PHOTOGRAPHED:
        digit = digits[number]
        reflected = 1 - np.maximum(ink * written(digit, SIZE, 180), lines * ruled(SIZE))
        found = centred(lit(reflected, shading), 28, 28, "")
        assert (found.was_dark, found.doubt) == (True, ""), number
        assert likeness(found.image[0], digit) > 0.85, number


def test_chalk_on_a_blackboard_is_a_digit(digits: np.ndarray) -> None:
    for digit in digits[PHOTOGRAPHED]:
        found = centred(lit(0.15 + 0.8 * written(digit, SIZE, 180), 0.4), 28, 28, "")
        assert (found.was_dark, found.doubt) == (False, "")
        assert likeness(found.image[0], digit) > 0.85


def test_a_photograph_of_a_phone_is_like_a_small_one(digits: np.ndarray) -> None:
    size = (1500, 2000)
    reflected = 1 - np.maximum(0.8 * written(digits[5], size, 450), 0.4 * ruled(size))
    found = centred(lit(reflected, 0.6), 28, 28, "")
    assert found.doubt == ""
    assert likeness(found.image[0], digits[5]) > 0.85


def test_a_turned_digit_stays_turned(digits: np.ndarray) -> None:
    found = centred(lit(1 - 0.8 * written(digits[7], SIZE, 180, 15), 0.5), 28, 28, "")
    turned = np.asarray(Image.fromarray(digits[7]).rotate(15, Image.Resampling.BICUBIC))
    assert likeness(found.image[0], turned) > 0.85


def test_a_thin_pen_gets_strokes_like_those_of_mnist() -> None:
    thin = np.zeros((200, 200))
    thin[40:160, 100:102] = 1
    found = centred(lit(1 - 0.8 * thin, 0.3), 28, 28, "").image[0]
    assert found.sum() / 255 == pytest.approx(20 * 0.09 * 20, rel=0.3)


def test_a_picture_without_one_digit_has_a_doubt(digits: np.ndarray) -> None:
    two = np.maximum(written(digits[2], SIZE, 120), np.roll(written(digits[3], SIZE, 120), 140, axis=1))
    assert centred(lit(1 - 0.8 * two, 0.3), 28, 28, "").doubt == "it has 2 separate shapes"
    block = np.zeros(SIZE)
    block[80:180, 100:240] = 1
    assert centred(lit(1 - 0.8 * block, 0.3), 28, 28, "").doubt == "its largest shape has no strokes"
    assert centred(lit(1 - 0.8 * np.roll(block, -80, axis=0), 0.3), 28, 28, "").doubt.endswith("the edge of the image")


@pytest.fixture
def of_mnist() -> TrainedModel:
    trained = with_arrays(nn.Sequential(nn.Flatten(), nn.Linear(2)), (1, 28, 28))
    return replace(trained, network=replace(trained.network, mean=(0.13,), std=(0.3,)))


def test_a_photograph_is_inverted_and_centred_for_a_network_of_mnist(
    of_mnist: TrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pixels = photograph()
    Image.fromarray(pixels[0]).save(tmp_path / "x.png")
    found = inputs.read(tmp_path / "x.png", of_mnist).images
    np.testing.assert_array_equal(found[0], centred(pixels, 28, 28, "").image)
    assert caplog.messages == [
        f"adtrain: warning: {tmp_path}/x.png: inverted, because its background is light, unlike in training "
        "(--invert no keeps it); digit scaled and centred as in MNIST"
    ]
    as_it_is = inputs.read(tmp_path / "x.png", of_mnist, ImageOptions("no", "no")).images
    assert np.median(as_it_is) > 190


def test_a_picture_that_may_not_show_a_digit_is_a_warning(
    of_mnist: TrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    block = np.zeros(SIZE)
    block[80:180, 100:240] = 1
    Image.fromarray(lit(1 - 0.8 * block, 0.3)[0]).save(tmp_path / "x.png")
    inputs.read(tmp_path / "x.png", of_mnist)
    (message,) = caplog.messages
    assert message.endswith("; it may not show one digit on plain paper: its largest shape has no strokes")


def test_an_image_like_those_of_the_training_is_not_changed(
    of_mnist: TrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    image = centred(photograph(), 28, 28, "").image
    Image.fromarray(image[0]).save(tmp_path / "x.png")
    np.testing.assert_array_equal(inputs.read(tmp_path / "x.png", of_mnist).images[0], image)
    assert caplog.messages == []
    inverted = inputs.read(tmp_path / "x.png", of_mnist, ImageOptions(invert="yes")).images
    np.testing.assert_array_equal(inverted[0], 255 - image)


def test_a_folder_stands_for_the_images_in_it(tmp_path: Path) -> None:
    for name in ("b.png", "a/c.JPG", "a/.d.png", ".e/f.png", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert inputs.files(tmp_path) == [tmp_path / "a/c.JPG", tmp_path / "b.png"]
