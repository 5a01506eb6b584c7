"""Points: sequences against SciPy, their order in an epoch, grids, and tables."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adtrain.data import DataError, points
from adtrain.data.points import MOST_DIMENSIONS, Labels, PointOptions

BOX = {"t": (0.0, 2.0), "x": (-1.0, 3.0)}


@pytest.mark.needs_jax  # which needs SciPy
def test_a_sobol_sequence_is_that_of_scipy() -> None:
    qmc: Any = import_module("scipy.stats.qmc")

    for dimensions in range(1, MOST_DIMENSIONS + 1):
        expected = qmc.Sobol(dimensions, scramble=False, bits=32).random(128)
        np.testing.assert_array_equal(points.sobol(128, dimensions), expected)


@given(st.integers(0, 7), st.integers(1, MOST_DIMENSIONS))
def test_each_part_of_an_axis_has_one_point_of_a_sobol_sequence(log_count: int, dimensions: int) -> None:
    count = 2**log_count
    found = np.floor(points.sobol(count, dimensions) * count)
    assert (np.sort(found, axis=0) == np.arange(count)[:, np.newaxis]).all()


@given(st.integers(1, 100), st.integers(1, 12))
def test_each_part_of_an_axis_has_one_point_of_a_latin_hypercube(count: int, dimensions: int) -> None:
    found = np.floor(points.latin_hypercube(count, dimensions) * count)
    assert (np.sort(found, axis=0) == np.arange(count)[:, np.newaxis]).all()


@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 6), st.integers(1, 4))
def test_the_batches_of_all_epochs_go_through_the_rows_over_and_over(
    sets: int, size: int, steps: int, epochs: int
) -> None:
    rows = sets * size
    taken = np.concatenate([points.order(rows, size, steps, epoch) for epoch in range(1, epochs + 1)])
    np.testing.assert_array_equal(taken, np.arange(len(taken)) % rows)


@given(st.integers(1, 4), st.integers(2, 3000))
def test_a_grid_has_the_corners_of_the_box_and_at_most_so_many_points(dimensions: int, most: int) -> None:
    box = {f"x{i}": (float(-i), 1.0 + i) for i in range(dimensions)}
    found = points.grid(box, most)
    assert len(found) <= max(most, 2**dimensions)
    assert len(found) == len(np.unique(found, axis=0))
    for column, (low, high) in zip(found.T, box.values(), strict=True):
        assert column.min() == low
        assert column.max() == high


def test_a_box_of_many_variables_is_evaluated_at_a_latin_hypercube() -> None:
    box = {f"x{i}": (-1.0, 1.0) for i in range(30)}
    found = points.grid(box, 50)
    assert found.shape == (50, 30)
    assert np.abs(found).max() <= 1


def test_the_data_set_is_normalised_by_the_box_and_labelled_with_all_measurements() -> None:
    rows = np.random.default_rng(0).random((10, 3))
    options = PointOptions(sampling="sobol")
    test, labels = points.grid(BOX, 25), np.arange(25.0)[:, np.newaxis]
    found = points.load(BOX, ("u",), 4, options, True, test, labels, rows)
    assert (found.mean, found.std) == ((1.0, 1.0), (1.0, 2.0))
    assert len(found.train) == 12  # three batches of 4
    parts = Labels(2, 1, known=True)
    known = np.concatenate([parts.known_points(found.train.labels), parts.known_outputs(found.train.labels)], axis=1)
    measured = np.concatenate(
        [parts.measured_points(found.train.labels), parts.measured_outputs(found.train.labels)], axis=1
    )
    assert set(map(tuple, known)) <= set(map(tuple, np.concatenate([test, labels], axis=1)))
    assert set(map(tuple, measured)) == set(map(tuple, rows))


def test_points_far_from_zero_are_stored_without_an_offset() -> None:
    box = {"t": (1e9, 1e9 + 1)}
    found = points.load(box, ("u",), 8, PointOptions(), True, points.grid(box, 8), None, None)
    assert np.ptp(np.asarray(found.train.images)) > 0.75
    assert found.offset[0] + np.asarray(found.test.images).min() == pytest.approx(1e9, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            b"t,u\n1,2\n",
            "a.csv:1: found no column x, expected the columns t, x, u, each once: the columns are",
        ),
        ("a.csv", b"t,x,u,x\n1,2,3,4\n", "a.csv:1: found two columns named x, expected the columns t, x, u, each once"),
        (
            "a.csv",
            b"u,t,x\n1,2,3\n1,,4\n",
            r"a.csv:3: found an empty cell in column 1 \(t\), expected a finite number; remove",
        ),
        ("a.csv", b"t,x,u\n1,2,NA\n", r"a.csv:2: found 'NA' in column 2 \(u\), expected a"),
        ("a.csv", b"t,x,u\n", "a.csv"),
        ("a.csv", b"t,x,u\n1,2,inf\n", "a.csv"),
        ("a.npy", b"nothing", "found no NPY header"),
        ("missing.npy", None, "cannot be read"),
    ],
)
def test_a_wrong_table_is_one_line_that_names_the_file(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        points.read_table(tmp_path / name, ("t", "x", "u"))
    assert "\n" not in str(raised.value)
    assert name in str(raised.value)
    assert not re.search("in training|data.missing", str(raised.value))


@pytest.mark.parametrize("array", [np.zeros((3, 2)), np.zeros(3), np.array([["a", "b", "c"]]), np.full((2, 3), np.nan)])
def test_an_array_of_another_shape_or_type_is_refused(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=r"a\.npy: found"):
        points.read_table(tmp_path / "a.npy", ("t", "x", "u"))


def test_a_truncated_array_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((4, 3)))
    whole = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(whole[:-8])
    with pytest.raises(DataError, match="bytes"):
        points.read_table(tmp_path / "a.npy", ("t", "x", "u"))


def test_arrays_in_fortran_order_are_read(tmp_path: Path) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.save(tmp_path / "a.npy", np.asfortranarray(rows))
    np.testing.assert_array_equal(points.read_table(tmp_path / "a.npy", ("t", "x", "u")), rows)


def test_sobol_of_too_many_variables_is_refused() -> None:
    box = {f"x{i}": (0.0, 1.0) for i in range(MOST_DIMENSIONS + 1)}
    with pytest.raises(DataError, match=f"found {MOST_DIMENSIONS + 1} variables, expected at most {MOST_DIMENSIONS}"):
        points.load(box, ("u",), 8, PointOptions(sampling="sobol"), True, points.grid(box, 8), None, None)
