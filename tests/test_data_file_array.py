"""Arrays that stay in their file, and what happens where the file changes while it is in use."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from forked_commands import Case, Commands
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from npz_files import parts, write_npz
from training_runs import write_config, write_data
from waiting import wait_until

from adtrain import data
from adtrain.data import DataError, file_array, idx, npz
from adtrain.data.file_array import DataFile, FileArray

pytestmark = pytest.mark.unfused

ROWS = np.arange(120, dtype=np.uint8).reshape(10, 12)


def write(path: Path, array: np.ndarray = ROWS) -> FileArray:
    path.write_bytes(b"header" + array.tobytes())
    with path.open("rb") as file:
        return FileArray(DataFile(path, file), 6, array.dtype, array.shape)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("arrays")


keys = st.one_of(
    st.integers(0, 9),
    st.slices(10),
    hnp.arrays(np.int64, hnp.array_shapes(min_dims=1, max_dims=2, min_side=0), elements=st.integers(0, 9)),
)


@given(key=keys, dtype=st.sampled_from(["uint8", "float32", ">f4"]))
def test_indexing_reads_the_rows_that_numpy_gives(folder: Path, key: object, dtype: str) -> None:
    rows = ROWS.astype(dtype)
    array = write(folder / "rows", rows)
    assert (array.shape, array.dtype, array.nbytes) == (rows.shape, rows.dtype, rows.nbytes)
    np.testing.assert_array_equal(array[key], rows[key])  # type: ignore[call-overload]
    images, expected = array.reshape(10, 2, 2, 3).transpose(0, 3, 1, 2), rows.reshape(10, 2, 2, 3).transpose(0, 3, 1, 2)
    assert images.shape == expected.shape
    np.testing.assert_array_equal(images[key], expected[key])  # type: ignore[call-overload]
    np.testing.assert_array_equal(np.asarray(images), expected)


@pytest.mark.parametrize("row", [-1, 10])
def test_a_row_that_does_not_exist_is_an_error(tmp_path: Path, row: int) -> None:
    with pytest.raises(IndexError, match=f"found rows 2 to {row}|found rows {row} to 2, expected 0 to 9"):
        write(tmp_path / "rows")[np.array([2, row])]


def truncate(path: Path) -> None:
    os.truncate(path, 50)


def copy_over(path: Path) -> None:
    content = path.read_bytes()
    before = path.stat().st_mtime_ns
    path.write_bytes(content[::-1])
    os.utime(path, ns=(before + 1, before + 1))  # the clock of a file system may be coarse


@pytest.mark.parametrize("change", [truncate, copy_over])
def test_a_change_of_the_file_is_an_error(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = tmp_path / "rows"
    array = write(path)
    array[:2]
    change(path)
    with pytest.raises(DataError, match=rf"^{path}: was changed while it was in use; expected the same content"):
        array[np.array([0, 9])]


def test_a_file_that_is_replaced_or_deleted_serves_until_the_end(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    array = write(path)
    path.with_name("new").write_bytes(b"new")
    path.with_name("new").replace(path)
    path.unlink()
    np.testing.assert_array_equal(array, ROWS)


def test_large_arrays_are_the_same_as_small_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "idx").mkdir()
    sources = [write_data(tmp_path / "idx")]
    for i, shape in enumerate([(8, 5, 4, 3), (8, 3, 4, 5), (8, 5, 4), (8, 6)]):
        for dtype in ("uint8", "float32", "int64", "bool", "float64", ">f4"):
            for fortran in (False, True):
                images = (np.asfortranarray if fortran else np.ascontiguousarray)(
                    rng.integers(0, 2, shape).astype(dtype)
                )
                sources.append(write_npz(tmp_path / f"{i}{dtype[-2:]}{fortran}.npz", parts(images)))
    small = [data.load(path=source) for source in sources]
    for module in (idx, npz):
        monkeypatch.setattr(module, "stays_in_file", lambda nbytes: True)
    kept = 0
    for source, expected in zip(sources, small, strict=True):
        found = data.load(path=source)
        kept += isinstance(found.train.images, FileArray)
        assert (found.mean, found.std) == (expected.mean, expected.std)
        for split, other in ((found.train, expected.train), (found.test, expected.test)):
            np.testing.assert_array_equal(split.images, other.images)
            np.testing.assert_array_equal(split.labels, other.labels)
            assert split.images.dtype == other.images.dtype
    assert kept == 1 + 4 * 6  # IDX, and all types in C order


def test_the_memory_of_a_container_is_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = tmp_path / "v2", tmp_path / "v1"
    monkeypatch.setattr(file_array, "LIMITS", limits)
    whole = file_array.machine_memory()
    limits[0].write_text("max\n")
    assert file_array.machine_memory() == whole
    limits[1].write_text("4096\n")
    assert file_array.machine_memory() == 4096
    assert [file_array.stays_in_file(nbytes) for nbytes in (1024, 1025)] == [False, True]


STREAMED = """\
from adtrain.data import idx
from adtrain.training import examples
idx.stays_in_file = lambda nbytes: True
examples._copy_limit = lambda device: 0
"""


@pytest.mark.parametrize("change", [truncate, copy_over])
def test_a_training_whose_data_change_ends_with_one_line_and_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: Commands, change: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path)
    images, metrics, err = tmp_path / "data/train-images-idx3-ubyte", Path("run/metrics.jsonl"), Path("err")
    train = "train tiny.yaml --eager --output-dir run --epochs 100000"
    commands.start(Case(train, err=str(err), before=STREAMED))
    wait_until(lambda: metrics.exists() and '"epoch"' in metrics.read_text(), commands)
    good = images.read_bytes()
    change(images)
    assert commands.wait() == 2
    (line,) = [line for line in err.read_text().splitlines() if not line.startswith("epoch ")]
    cause = f"{images}: was changed while it was in use; expected the same content until the end"
    assert line == f"adtrain: error: {cause}; continue with: adtrain train --resume run"
    images.write_bytes(good)
    done = json.loads(metrics.read_text().splitlines()[-1])["step"]  # the training may be epochs ahead of this test
    resume = f"train --resume run --eager --steps {done + 1}"
    assert commands.run(Case(resume, err=str(err), before=STREAMED)) == 0, err.read_text()
