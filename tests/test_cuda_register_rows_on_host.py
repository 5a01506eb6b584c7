"""Row-fused kernels that hold a long row in registers, compiled for the CPU, against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, host
from program_samples import ON_GPU

import adtrain as ad
from adtrain import ops
from adtrain.backends.cuda.codegen.register_rows import register_rows
from adtrain.backends.cuda.forms.row_fused import ROW_FUSED
from adtrain.core.array import array
from adtrain.core.program import body_of
from adtrain.core.staging import evaluate, stage

__all__ = ["host"]

LANES, BLOCK, LANES_OF_MANY_ROWS = (701, 64), (33, 1001), (2050, 132)
"""Shapes whose rows are shared by lanes of a warp, by a block, and by lanes where rows are many."""
TOLERANCE = {"float32": 2e-6, "float64": 1e-14}
"""Of the largest element."""


def softmax_gradient(x: Any, ct: Any, label: Any) -> Any:
    return ad.vjp(ops.softmax, x)[1](ct)


def loss_and_gradient(x: Any, ct: Any, label: Any) -> Any:
    loss, pullback = ad.vjp(lambda x: ops.cross_entropy(x, label, reduction="none"), x)
    return loss, pullback(loss * loss), ops.argmax(x, axis=1) == label


def layer_norm_gradient(x: Any, ct: Any, label: Any) -> Any:
    def norm(x: Any) -> Any:
        return ops.layer_norm(x, x.shape[1], ct[0], ct[1])

    return ad.vjp(norm, x)[1](ct)


def picked(x: Any, ct: Any, label: Any) -> Any:
    extremes = ops.max(x, axis=1, keepdims=True) - ops.min(x, axis=1, keepdims=True)
    return ops.one_hot(label, x.shape[1]) * extremes + ct


@pytest.mark.parametrize(
    ("f", "shape", "dtype"),
    [
        (softmax_gradient, BLOCK, "float32"),
        (loss_and_gradient, LANES, "float64"),
        (layer_norm_gradient, LANES_OF_MANY_ROWS, "float32"),
        (picked, LANES, "float32"),
        pytest.param(loss_and_gradient, BLOCK, "float32", marks=pytest.mark.exhaustive),
        pytest.param(layer_norm_gradient, BLOCK, "float64", marks=pytest.mark.exhaustive),
        pytest.param(picked, LANES_OF_MANY_ROWS, "float32", marks=pytest.mark.exhaustive),
    ],
)
def test_rows_in_registers_match_numpy(f: Callable[..., Any], shape: tuple[int, int], dtype: str, host: Host) -> None:
    rng = np.random.default_rng(0)
    given = [
        rng.normal(size=shape).astype(dtype) * 3,
        rng.normal(size=shape).astype(dtype),
        rng.integers(0, shape[1], shape[0]),
    ]
    given[0][1, 2] = given[0][1].max() + 1  # the last equal maximum must not win
    given[0][1, 7] = given[0][1, 2]
    program = stage(f, ON_GPU).program(*map(array, given))
    found = [e for e in program.equations if e.form == ROW_FUSED]
    assert found
    known = dict(zip(program.inputs, given, strict=True)) | {v: x.numpy() for v, x in program.constants.items()}
    for e in program.equations:
        arrays = [known[v] for v in e.inputs]
        expected = [v.numpy() for v in evaluate(body_of(e), [array(x) for x in arrays])]
        known |= dict(zip(e.outputs, expected, strict=True))
        if e in found:
            assert register_rows(body_of(e)) is not None
            for v, result in zip(e.outputs, host.computed(e, None, arrays), strict=True):
                error = np.abs(np.subtract(result, known[v], dtype="float64")).max()
                assert error <= TOLERANCE[dtype] * max(1, np.abs(known[v]).max()), str(v.type)


def test_a_label_that_is_no_class_is_reported(host: Host) -> None:
    x, label = np.ones((700, 100), np.float32), np.full(700, 100)
    program = stage(lambda x, label: ops.cross_entropy(x, label, reduction="none"), ON_GPU).program(
        array(x), array(label)
    )
    (equation,) = (e for e in program.equations if e.form == ROW_FUSED)
    part = register_rows(body_of(equation))
    assert part is not None
    assert part.checked


@pytest.mark.parametrize("length", [10, 63])
def test_short_rows_are_computed_several_at_a_time(length: int) -> None:
    x = array(np.ones((4000, length), np.float32))
    program = stage(lambda x: softmax_gradient(x, x, None), ON_GPU).program(x)
    bodies = [body_of(e) for e in program.equations if e.form == ROW_FUSED]
    assert [register_rows(body) for body in bodies] == [None] * len(bodies)
