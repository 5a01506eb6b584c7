from __future__ import annotations

import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from npz_files import npz_bytes, parts, write_npz

from adtrain import data
from adtrain.data import DataError, DataOptionError, Options, npz
from adtrain.data.file_array import FileArray

images = hnp.arrays(
    st.sampled_from(["uint8", "float32", "float64", ">f4", "int16", "bool"]),
    st.one_of(hnp.array_shapes(min_dims=2, max_dims=3, max_side=4), st.just((3, 1, 4, 2)), st.just((3, 4, 2, 3))),
    elements={"min_value": 0, "max_value": 1},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("npz")


@given(array=images, compressed=st.booleans(), fortran=st.booleans())
def test_images_are_read_with_channels_first(folder: Path, array: np.ndarray, compressed: bool, fortran: bool) -> None:
    stored = np.asfortranarray(array) if fortran else array
    found = npz.read(write_npz(folder / "x.npz", parts(stored, test=1), compressed), Options())
    flat = array.ndim == 2
    channels_last = array.shape == (3, 4, 2, 3)
    expected = array.transpose(0, 3, 1, 2) if channels_last else array[:, :, None, None] if flat else array
    expected = expected[:, np.newaxis] if array.ndim == 3 else expected
    np.testing.assert_array_equal(found.train.images, expected.astype(found.train.images.dtype))
    numbers = np.float64 if array.dtype == np.float64 else np.float32
    assert found.train.images.dtype == (numbers if flat or array.dtype.kind == "f" else np.uint8)
    np.testing.assert_array_equal(found.train.labels, np.arange(len(array)) % 2)
    assert found.test is not None
    assert len(found.test.images) == 1


def test_large_uncompressed_arrays_stay_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npz, "stays_in_file", lambda nbytes: nbytes >= 100)
    arrays = parts(np.zeros((4, 5, 5), np.uint8))
    for compressed in (False, True):
        found = npz.read(write_npz(tmp_path / "x.npz", arrays, compressed), Options())
        assert isinstance(found.train.images, FileArray) is not compressed
        assert found.test is not None
        assert isinstance(found.test.images, np.ndarray)
        assert not found.test.images.flags.writeable


def test_flat_rows_become_images_of_the_given_shape(tmp_path: Path) -> None:
    rows = np.arange(24, dtype=np.uint8).reshape(2, 12)
    path = write_npz(tmp_path / "x.npz", {"images": rows, "labels": np.arange(2)})
    np.testing.assert_array_equal(npz.read(path, Options(shape=(3, 2, 2))).train.images, rows.reshape(2, 3, 2, 2))
    with pytest.raises(DataOptionError, match=r"data.shape: found \[1, 2, 2\], but .*images.npy has images of shape"):
        npz.read(path, Options(shape=(1, 2, 2)))


def test_strings_and_arbitrary_integers_become_classes(tmp_path: Path) -> None:
    for labels, classes in ((np.array(["b", "a", "b"]), ("a", "b")), (np.array([[7], [-2], [7]]), ("-2", "7"))):
        path = write_npz(tmp_path / "x.npz", {"images": np.zeros((3, 2, 2), np.uint8), "labels": labels})
        found = data.load(path=path, options=Options(test=0.34))
        assert found.classes == classes
        assert sorted([*found.train.labels, *found.test.labels]) == [0, 1, 1]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"a": np.zeros(3)},
            r"x.npz: found 'a', expected x_train and y_train \(x_test, y_test\), images and labels, or X and",
        ),
        (
            {"images": np.zeros((3, 2)), "labels": np.zeros((3, 1, 1))},
            "x.npz:labels.npy: found float64 of shape .3, 1, 1., expected",
        ),
        ({"images": np.zeros((3, 2)), "labels": np.arange(2)}, "labels.npy: found 2 labels, expected 3, one for each"),
        ({"images": np.zeros(3), "labels": np.arange(3)}, "images.npy: found the shape .3,., expected .N, F."),
        ({"images": np.zeros((3, 0)), "labels": np.arange(3)}, "images.npy: found no pixels"),
        ({"images": np.array([["a"]]), "labels": np.arange(1)}, "images.npy: found elements of type <U1, expected"),
        ({**parts(np.zeros((3, 2))), "x_test": np.zeros((2, 3))}, "found test images of shape .3, 1, 1., expected .2,"),
    ],
)
def test_errors_name_the_array_that_does_not_fit(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(DataError, match=message):
        data.load(path=write_npz(tmp_path / "x.npz", arrays), options=Options())


@pytest.mark.parametrize("names", [("x_train", "y_train"), ("X_train", "y_train"), ("images", "labels"), ("X", "y")])
def test_arrays_have_the_names_that_others_use(tmp_path: Path, names: tuple[str, str]) -> None:
    arrays: dict[str, np.ndarray] = dict(zip(names, (np.zeros((3, 2), np.float32), np.arange(3)), strict=True))
    if names[0] == "X_train":
        arrays |= {"X_test": np.ones((1, 2)), "y_test": np.zeros(1, int)}
    found = npz.read(write_npz(tmp_path / "x.npz", arrays), Options())
    assert found.train.labels.tolist() == [0, 1, 2]
    assert (found.test is not None) == (names[0] == "X_train")


def test_a_test_part_without_labels_is_refused(tmp_path: Path) -> None:
    arrays = parts(np.zeros((3, 2)))
    del arrays["y_test"]
    with pytest.raises(DataError, match="found x_test only, expected both x_test and y_test or neither"):
        npz.read(write_npz(tmp_path / "x.npz", arrays), Options())


def test_pickled_python_objects_are_refused(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "x.npz", {"images": np.array([[1, "x"]], object), "labels": np.arange(1)})
    with pytest.raises(DataError, match=r"images.npy: found Python objects \(pickle\), which are not loaded"):
        npz.read(path, Options())


def npy_header(shape: str, descr: str = "|u1") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}\n".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("shape", ["2147483648, 28, 28", "1099511627775, 1099511627775", "99999999999999999999, 2"])
def test_a_header_with_a_false_shape_allocates_nothing(tmp_path: Path, compression: int, shape: str) -> None:
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("images.npy", npy_header(shape) + b"\0" * 100)
        archive.writestr("labels.npy", npy_header("1,") + b"\0")
    tracemalloc.start()
    with pytest.raises(DataError, match=r"images.npy: found (\d+ bytes, expected \d{10,}|the shape)"):
        npz.read(path, Options())
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_zip_directory_with_a_false_size_is_refused(tmp_path: Path) -> None:
    content = npz_bytes({"images": np.zeros((9, 2, 2), np.uint8), "labels": np.arange(9)}, compressed=True)
    entry = content.index(b"PK\x01\x02")
    bomb = bytearray(content)
    bomb[entry + 24 : entry + 28] = struct.pack("<I", 2**31)
    path = tmp_path / "x.npz"
    path.write_bytes(bomb)
    with pytest.raises(DataError, match=r"images.npy: found a size of 2147483648 bytes, expected at most"):
        npz.read(path, Options())


@given(data_=st.data(), compressed=st.booleans())
def test_a_damaged_file_is_read_or_raises_data_error(folder: Path, data_: st.DataObject, compressed: bool) -> None:
    content = bytearray(npz_bytes(parts(np.arange(24.0).reshape(4, 6)), compressed))
    for _ in range(data_.draw(st.integers(1, 6))):
        content[data_.draw(st.integers(0, len(content) - 1))] = data_.draw(st.integers(0, 255))
    path = folder / "damaged.npz"
    path.write_bytes(content[: data_.draw(st.integers(len(content) // 2, len(content)))])
    try:
        found = npz.read(path, Options())
    except DataError as error:
        assert str(error).startswith(str(path))  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert len(found.train.images) == len(found.train.labels)


@pytest.mark.parametrize("code", [0xD800, 0xDFFF, 0x110000, 0xFFFFFFFF])
@pytest.mark.parametrize("order", "<>")
def test_labels_that_are_no_unicode_text_are_refused(tmp_path: Path, code: int, order: str) -> None:
    codes = np.array([[97, 98], [99, code]], f"{order}u4")
    path = write_npz(tmp_path / "x.npz", {"images": np.eye(2), "labels": codes.view(f"{order}U2").ravel()})
    with pytest.raises(DataError, match=f"labels.npy: found the code 0x{code:x} in label 1, expected Unicode text"):
        npz.read(path, Options())


def test_labels_of_all_planes_are_read(tmp_path: Path) -> None:
    names = np.array(["\0x", "\U0010ffff", ""], ">U2")
    found = npz.read(write_npz(tmp_path / "x.npz", {"images": np.eye(3), "labels": names}), Options())
    assert found.train.labels.tolist() == names.tolist()
