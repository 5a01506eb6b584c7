from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from idx_files import write_folder, write_idx

from adtrain import data
from adtrain.data import catalogue
from adtrain.data.statistics import channel_statistics


@pytest.fixture(scope="module")
def mnist() -> data.DataSet:
    return data.load("mnist")


def test_packaged_mnist_has_the_original_checksums_and_class_counts(mnist: data.DataSet) -> None:
    assert all(check.passed for check in catalogue.verify(data.CATALOGUE["mnist"]))
    train = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    test = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert np.bincount(mnist.train.labels).tolist() == train
    assert np.bincount(mnist.test.labels).tolist() == test


def test_the_catalogue_entry_of_mnist_matches_its_files(mnist: data.DataSet) -> None:
    entry = data.CATALOGUE["mnist"]
    assert mnist.train.images.shape == (entry.train_images, *entry.shape)
    assert mnist.test.images.shape == (entry.test_images, *entry.shape)
    assert [mnist.train.images.dtype.name, mnist.train.labels.dtype.name] == ["uint8", "int64"]
    assert mnist.classes == entry.classes
    np.testing.assert_allclose((mnist.mean, mnist.std), channel_statistics(mnist.train.images), rtol=1e-12)


@pytest.mark.parametrize("separator", ["-", "."])
def test_a_folder_of_idx_files_is_loaded(tmp_path: Path, separator: str) -> None:
    found = data.load(path=write_folder(tmp_path / "shapes", separator=separator))
    assert found.name == "shapes"
    assert found.train.images.shape == (30, 1, 4, 5)
    assert (len(found.train), len(found.test)) == (30, 10)
    assert found.classes == ("0", "1", "2")
    pixels = np.asarray(found.train.images) / 255
    np.testing.assert_allclose((found.mean, found.std), ([pixels.mean()], [pixels.std()]), rtol=1e-12)


def test_statistics_are_per_channel_and_a_constant_channel_has_deviation_one() -> None:
    images = np.stack([np.full((7, 2, 2), 255), np.arange(28).reshape(7, 2, 2)], axis=1).astype(np.uint8)
    mean, std = channel_statistics(images)
    np.testing.assert_allclose(mean, [1.0, (np.arange(28) / 255).mean()])
    np.testing.assert_allclose(std, [1.0, (np.arange(28) / 255).std()])


def test_compressed_idx_files_are_loaded(tmp_path: Path) -> None:
    plain = data.load(path=write_folder(tmp_path))
    labels = tmp_path / "train-labels-idx1-ubyte"
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", plain.train.labels.astype(np.uint8))
    labels.unlink()
    np.testing.assert_array_equal(data.load(path=tmp_path).train.labels, plain.train.labels)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("train-labels-idx1-ubyte", None, "found no file train-labels-idx1-ubyte, expected it or one of "),
        ("train-labels-idx1-ubyte", np.zeros(29, np.uint8), "found 29 labels, expected 30, one for each image of "),
        ("t10k-images-idx3-ubyte", np.zeros((10, 5, 5), np.uint8), r"found test images of .*5, 5.*, expected .*4, 5"),
        ("train-images-idx3-ubyte", np.zeros(30, np.uint8), "found uint8 in 1 dimensions, expected uint8 in 3 or 4"),
        ("train-labels-idx1-ubyte", np.zeros(30, np.int32), "found int32 in 1 dimensions, expected uint8 in 1"),
        ("t10k-images-idx3-ubyte", np.zeros((10, 0, 5), np.uint8), "found no pixels"),
    ],
)
def test_the_error_of_files_that_do_not_match_names_the_file(
    tmp_path: Path, name: str, array: np.ndarray | None, message: str
) -> None:
    path = write_folder(tmp_path) / name
    if array is None:
        path.unlink()
    else:
        write_idx(path, array)
    with pytest.raises(data.DataError, match=message) as caught:
        data.load(path=tmp_path)
    assert str(caught.value).startswith(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_label_outside_the_classes_of_the_catalogue_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "mnist", classes=11)
    monkeypatch.setattr(catalogue, "asset_path", lambda folder: tmp_path)
    with pytest.raises(data.DataError, match="train-labels-idx1-ubyte: found label 10, expected 0 to 9"):
        data.load("mnist")


def test_a_wrong_name_or_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match="unknown data set 'minst'; known: mnist"):
        data.load("minst")
    with pytest.raises(data.DataError, match=r"found nothing, expected a .csv, .tsv, .npz, .txt, .zip, .tar, "):
        data.load(path=tmp_path / "none")
    with pytest.raises(data.DataError, match="file, a folder of IDX files, a folder of tokens or a folder of images;"):
        data.load(path=tmp_path / "none")
    with pytest.raises(data.DataError, match=r"none\.txt: found nothing, expected a text file;"):
        data.load(path=tmp_path / "none.txt")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(
        data.DataError,
        match=r"found a file without an extension, expected a .csv, .tsv, .npz, .txt, .zip, .tar, ",
    ):
        data.load(path=file)
    with pytest.raises(data.DataError, match="either the name of a data set or a path"):
        data.load()
    with pytest.raises(data.DataError, match="either the name of a data set or a path"):
        data.load("mnist", tmp_path)


def test_verification_reports_changed_and_missing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = data.CATALOGUE["mnist"]
    small = replace(entry, sha256={name: entry.sha256[name] for name in sorted(entry.sha256) if "labels" in name})
    (tmp_path / "mnist").mkdir()
    changed, missing = small.sha256
    shutil.copy(entry.folder / missing, tmp_path / "mnist" / changed)
    monkeypatch.setattr(catalogue, "asset_path", lambda folder: tmp_path)
    checks = {check.path.name: check for check in catalogue.verify(small)}
    assert not any(check.passed for check in checks.values())
    assert checks[changed].found == entry.sha256[missing]
    assert checks[missing].found == "cannot be read (No such file or directory)"
