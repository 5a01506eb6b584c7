"""The data of neural fields: images and arrays, the places of their elements, and files that are refused."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from adtrain.data import DataError, points

LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(LENGTHS)
def test_elements_are_in_the_middle_of_equal_parts_of_the_unit_box(shape: tuple[int, ...]) -> None:
    found = points.places(shape).reshape(*shape, len(shape))
    for index in np.ndindex(shape):
        expected = [(i + 0.5) / n for i, n in zip(index, shape, strict=True)]
        np.testing.assert_allclose(found[index], expected, rtol=1e-6)
    assert points.shape_of(points.places(shape)) == shape


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_pixels_are_examples_with_colours_in_the_unit_interval(tmp_path: Path, mode: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 3), dtype=np.uint8)
    path = tmp_path / "photo.png"
    Image.fromarray(pixels).convert(mode).save(path)
    found = points.load_field(path, "image")
    with Image.open(path) as image:
        expected = np.asarray(image.convert("L" if mode == "L" else "RGB")).reshape(15, -1) / 255
    np.testing.assert_allclose(found.train.labels, expected, rtol=1e-6)
    assert found.targets == (("grey",) if mode == "L" else ("red", "green", "blue"))
    assert (found.features, found.mean, found.std) == (("y", "x"), (0.5, 0.5), (0.5, 0.5))
    assert found.train is found.test


@given(LENGTHS, st.sampled_from(["float32", "float64", "int16", "uint8"]), st.booleans())
def test_elements_of_an_array_are_examples(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], dtype: str, fortran: bool
) -> None:
    values = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    path = tmp_path_factory.mktemp("fields") / "field.npy"
    np.save(path, np.asfortranarray(values) if fortran else values)
    found = points.load_field(path, "volume")
    np.testing.assert_array_equal(np.asarray(found.train.labels).reshape(shape), values)
    assert found.train.labels.dtype == np.float32
    assert found.features == ("x", "y", "z", "t")[: len(shape)]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for kind, name in (("image", "photo.png"), ("volume", "field.npy")):
        with pytest.raises(DataError, match=rf"/{name}: cannot be read \(No such file or directory\)$"):
            points.load_field(tmp_path / name, kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "name", "error"),
    [
        ("image", "a.npy", "found the extension .npy, expected a PNG or JPEG file; data.volume takes this one"),
        ("volume", "a.PNG", "found the extension .png, expected an .npy file; data.image takes this one"),
    ],
)
def test_a_file_of_the_other_kind_is_refused_with_its_key(
    tmp_path: Path, kind: points.FieldKind, name: str, error: str
) -> None:
    with pytest.raises(DataError, match=f"^{re.escape(f'{tmp_path / name}: {error}')}$"):
        points.load_field(tmp_path / name, kind)


def test_transparent_images_are_refused(tmp_path: Path) -> None:
    Image.new("RGBA", (4, 4), (255, 0, 0, 128)).save(tmp_path / "photo.png")
    with pytest.raises(DataError, match="found transparent pixels, expected an opaque image"):
        points.load_field(tmp_path / "photo.png", "image")


@pytest.mark.parametrize(
    ("values", "error"),
    [
        (np.zeros((2, 2, 2, 2, 2)), r"found the shape \(2, 2, 2, 2, 2\), expected at most 4 axes$"),
        (np.zeros(()), r"found float64 of shape \(\), expected numbers of 1 to 4 axes, none of them empty$"),
        (np.zeros((3, 0)), r"found float64 of shape \(3, 0\), expected numbers of 1 to 4 axes, none of them empty$"),
        (np.array(["a"]), r"found <U1 of shape \(1,\), expected numbers of 1 to 4 axes, none of them empty$"),
        (np.array([1.0, np.nan]), "found a number that is not finite in float32, expected finite ones$"),
        (np.array([1e200]), "found a number that is not finite in float32, expected finite ones$"),
    ],
    ids=["5 axes", "no axis", "empty", "texts", "NaN", "beyond float32"],
)
def test_other_arrays_are_refused_in_one_line(tmp_path: Path, values: np.ndarray, error: str) -> None:
    path = tmp_path / "field.npy"
    np.save(path, values)
    with pytest.raises(DataError, match=rf"^{path}: {error}"):
        points.load_field(path, "volume")


def test_a_damaged_array_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "field.npy"
    np.save(path, np.zeros((4, 4)))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"found \d+ bytes or more, expected \d+$"):
        points.load_field(path, "volume")
