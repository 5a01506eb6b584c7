"""split, tile, repeat, roll, diagonals and triangles are those of NumPy."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from compiled_parity import check_all
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import adtrain as ad
from adtrain import ops

anything = st.sampled_from(["float64", "int32", "bool"]).flatmap(
    lambda dtype: arrays.arrays(
        dtype, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4), elements=st.integers(0, 1)
    )
)
matrices = st.sampled_from(["float64", "int32", "bool"]).flatmap(
    lambda dtype: arrays.arrays(
        dtype, arrays.array_shapes(min_dims=2, max_dims=4, min_side=0, max_side=4), elements=st.integers(0, 1)
    )
)
axes = st.integers(-3, 2)


def assert_as_numpy(ours: Any, theirs: Any) -> None:
    """Both give equal arrays, or both refuse the arguments."""
    try:
        expected = theirs()
    except (ValueError, TypeError, IndexError, ZeroDivisionError):
        with pytest.raises(ad.AdtrainError):
            ours()
        return
    found = ours()
    if isinstance(expected, list):
        assert len(found) == len(expected)
    else:
        found, expected = [found], [np.asarray(expected)]
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a.numpy(), b, strict=True)


@given(anything, st.one_of(st.integers(-1, 4), st.lists(st.integers(-5, 5), max_size=3)), axes)
def test_split_is_that_of_numpy(x: np.ndarray, cuts: Any, axis: int) -> None:
    assert_as_numpy(lambda: ops.split(x, cuts, axis), lambda: np.split(x, cuts, axis))


@given(anything, st.one_of(st.integers(-1, 3), st.lists(st.integers(0, 3), max_size=4)))
def test_tile_is_that_of_numpy(x: np.ndarray, reps: Any) -> None:
    assert_as_numpy(lambda: ops.tile(x, reps), lambda: np.tile(x, reps))


@given(anything, st.one_of(st.integers(-1, 3), st.lists(st.integers(0, 3), max_size=4)), st.none() | axes)
def test_repeat_is_that_of_numpy(x: np.ndarray, repeats: Any, axis: int | None) -> None:
    assert_as_numpy(lambda: ops.repeat(x, repeats, axis), lambda: np.repeat(x, np.array(repeats, dtype=np.int64), axis))


shifts = st.integers(-7, 7)


@given(anything, shifts | st.tuples(shifts, shifts), st.none() | axes | st.tuples(axes, axes))
def test_roll_is_that_of_numpy(x: np.ndarray, shift: Any, axis: Any) -> None:
    if isinstance(shift, tuple) and axis is None:
        with pytest.raises(ad.OptionError, match="without axes"):
            ops.roll(x, shift)
        return
    assert_as_numpy(lambda: ops.roll(x, shift, axis), lambda: np.roll(x, shift, axis))


@given(matrices, st.integers(-5, 5), axes, axes)
def test_diagonal_and_trace_are_those_of_numpy(x: np.ndarray, offset: int, axis1: int, axis2: int) -> None:
    assert_as_numpy(lambda: ops.diagonal(x, offset, axis1, axis2), lambda: np.diagonal(x, offset, axis1, axis2))
    assert_as_numpy(lambda: ops.trace(x, offset, axis1, axis2), lambda: np.trace(x, offset, axis1, axis2))


@given(anything, st.integers(-5, 5))
def test_diag_is_that_of_numpy(x: np.ndarray, k: int) -> None:
    assert_as_numpy(lambda: ops.diag(x, k), lambda: np.diag(x, k))


@given(matrices, st.integers(-5, 5))
def test_tril_and_triu_are_those_of_numpy(x: np.ndarray, k: int) -> None:
    assert_as_numpy(lambda: ops.tril(x, k), lambda: np.tril(x, k))
    assert_as_numpy(lambda: ops.triu(x, k), lambda: np.triu(x, k))


def test_triangles_leave_out_infinite_elements() -> None:
    x = np.array([[1.0, np.inf], [np.nan, 2.0]])
    assert ops.tril(ops.triu(x)).numpy().tolist() == [[1, 0], [0, 2]]
    assert ad.grad(lambda x: ops.triu(ops.tril(x)).sum())(x).numpy().tolist() == [[1, 0], [0, 1]]


MATRIX = np.ones((2, 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.split(MATRIX, 2, 1), "split: found 2 sections of an axis of length 3, expected a number that div"),
        (lambda: ops.split(MATRIX, cast(int, 1.5)), "split: found indices_or_sections 1.5, expected integers"),
        (lambda: ad.jit(lambda x, n: ops.split(x, n))(MATRIX, np.array(2)), "split: indices_or_sections is a traced"),
        (lambda: ops.tile(MATRIX, (1, -1)), r"tile: found reps \(1, -1\), expected numbers of at least 0"),
        (
            lambda: ops.repeat(MATRIX, (1, 2), 1),
            r"repeat: found repeats \(1, 2\) for an axis of length 3, ex",
        ),
        (lambda: ops.roll(MATRIX, (1, 2)), r"roll: found shifts \(1, 2\) without axes, expected one shift"),
        (
            lambda: ops.roll(MATRIX, (1, 2, 3), (0, 1)),
            r"roll: found shifts \(1, 2, 3\) for axes \(0, 1\), expec",
        ),
        (lambda: ops.roll(MATRIX, cast(int, 0.5)), "roll: found shift 0.5, expected integers"),
        (lambda: ops.diag(np.ones((2, 2, 2))), r"diag: found shape \(2, 2, 2\), .* write ops\.diagonal\(x\)"),
        (lambda: ops.trace(MATRIX, 0, 1, 1), "trace: axis1 and axis2 are both 1, expected two axes"),
        (lambda: ops.trace(np.ones(2)), "trace: axis 1 is out of range for an array of 1 dimensions"),
        (lambda: ops.tril(np.ones(2)), r"tril: found shape \(2,\), expected at least two axes"),
    ],
)
def test_arguments_that_do_not_fit_are_one_line(call: Any, message: str) -> None:
    with pytest.raises(ad.AdtrainError, match="^" + message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.compiled
def test_compiled_results_of_integers_equal_eager_ones() -> None:
    """The case table has those of floating-point numbers."""
    x = np.arange(60, dtype=np.int32).reshape(3, 4, 5)
    calls: dict[str, Any] = {
        "split": lambda x: ops.split(x, (1, 3), 1),
        "tile": lambda x: ops.tile(x, (2, 1, 1, 2)),
        "repeat": lambda x: (ops.repeat(x, 2), ops.repeat(x, (0, 2, 1), 0)),
        "roll": lambda x: (ops.roll(x, 7), ops.roll(x, (1, -2), (0, 2))),
        "diagonals": lambda x: (ops.diagonal(x, 1, 2, 0), ops.diag(x[0, 0], -1), ops.trace(x)),
        "triangles": lambda x: (ops.tril(x, 1), ops.triu(x, -1)),
    }
    check_all({name: (f, [x]) for name, f in calls.items()}, 0)
