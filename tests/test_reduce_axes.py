"""Reductions over no axis and of 0-d arrays, and any and all, agree with NumPy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from compiled_parity import both

import adtrain as ad
from adtrain import ops

REDUCTIONS = ("sum", "mean", "var", "max", "min", "any", "all")
KEEPING = ("cumsum", "softmax", "log_softmax", "logsumexp")


@pytest.mark.compiled
def test_reductions_over_no_axes_and_of_numbers_equal_numpy() -> None:
    matrix, number = np.arange(6.0).reshape(2, 3), np.array(2.0)
    functions: dict[str, Any] = {}
    for name in REDUCTIONS:
        functions[f"{name} ()"] = (lambda x, name=name: getattr(ops, name)(x, ())), [matrix]
    for name in (*REDUCTIONS, *KEEPING, "argmax"):
        for axis in (0, -1):
            functions[f"{name} {axis}"] = (lambda x, f=name, axis=axis: getattr(ops, f)(x, axis)), [number]
    for key, found in both(functions).items():
        assert not isinstance(found, Exception), found
        found.check(0)
        name, x = key.partition(" ")[0], functions[key][1][0]
        if name in REDUCTIONS:
            np.testing.assert_array_equal(found.eager[0], getattr(np, name)(x, axis=()))
        else:
            assert found.eager[0] == {"softmax": 1, "log_softmax": 0, "argmax": 0}.get(name, 2)


def test_other_axes_of_a_number_are_out_of_range() -> None:
    for name in (*REDUCTIONS, *KEEPING, "argmax"):
        with pytest.raises(ad.ShapeError, match="axis 1 is out of range for an array of 0 dimensions"):
            getattr(ops, name)(np.array(2.0), 1)
    with pytest.raises(ad.OptionError, match=r"softmax: found axis \(\), expected an integer"):
        ops.softmax(np.ones(2), ())  # type: ignore[arg-type]


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8", "uint32", "bool"])
def test_any_and_all_equal_numpy(dtype: str) -> None:
    x = np.array([[0, 0, 0], [1, 0, 2], [3, 1, 1]]).astype(dtype)
    if x.dtype.kind == "f":
        x[0, 0], x[1, 1] = -0.0, np.nan
    functions: dict[str, Any] = {}
    expected: dict[str, Any] = {}
    for name, axis, given in itertools.product(("any", "all"), (None, 0, 1, (0, 1)), (x, x[:, :0])):
        key = f"{name} {axis} {given.shape}"
        functions[key] = (lambda x, f=name, axis=axis: getattr(ops, f)(x, axis, keepdims=True)), [given]
        expected[key] = getattr(np, name)(given, axis=axis, keepdims=True)
    for key, found in both(functions).items():
        assert not isinstance(found, Exception), found
        for result in (found.eager[0], found.compiled[0]):
            np.testing.assert_array_equal(result, expected[key], strict=True)


def test_any_and_all_are_methods() -> None:
    x = ad.array([0.0, 1.0])
    assert (bool((x == x).all()), bool((x > 1).any()), (x > 0).any(0).item()) == (True, False, True)
