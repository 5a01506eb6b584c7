"""Photographs of digits become images of MNIST's form before a network sees them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from random_networks import with_arrays

from adtrain import nn
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
    found = centred(255 - photograph(height, width, top, left), 28, 28, "x.png")
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
    with pytest.raises(DataError, match=r"^x\.png: found an image without contrast, expected a digit; --center no"):
        centred(np.full((1, 40, 40), 90, np.uint8), 28, 28, "x.png")


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
    np.testing.assert_array_equal(found[0], centred(255 - pixels, 28, 28, ""))
    assert caplog.messages == [
        f"adtrain: {tmp_path}/x.png: inverted, because its background is light, unlike in training "
        "(--invert no keeps it); digit scaled and centred as in MNIST"
    ]
    as_it_is = inputs.read(tmp_path / "x.png", of_mnist, ImageOptions("no", "no")).images
    assert np.median(as_it_is) > 190


def test_an_image_like_those_of_the_training_is_not_changed(
    of_mnist: TrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    image = centred(255 - photograph(), 28, 28, "")
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
