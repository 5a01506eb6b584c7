"""Row-wise equations of arrays with any number of axes: rows in registers, and split reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, check_kernels, host
from cuda_samples import Shaped
from hypothesis import strategies as st
from program_samples import everywhere, for_gpu, names
from sweeps import check_examples, examples

import adtrain as ad
from adtrain import ops, passes
from adtrain.backends.cpu.numpy_program import NumpyProgram
from adtrain.backends.cuda import fusions
from adtrain.backends.cuda.forms.row_fused import ROW_FUSED
from adtrain.core.program import LOOPS, Equation, Program, body_of
from adtrain.core.staging import stage
from adtrain.core.types import Shape

__all__ = ["host"]

TOLERANCE = {"float32": 3e-6, "float64": 1e-11}
"""Maximum norm of the error over the norm of the result."""


def drawn(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(dtype)


def fused(f: Any, *shapes: Shape) -> Program:
    return for_gpu(stage(f).program(*(Shaped(*shape) for shape in shapes)))


def row_fused(program: Program) -> list[Equation]:
    return [e for e in program.equations if e.form == ROW_FUSED]


def inside(equation: Equation) -> list[str]:
    """The names of the primitives along rows in a fused equation."""
    return [e.name for e in everywhere(body_of(equation)) if e.name in ("sum", "max", "softmax")]


def attention(q: Any, k: Any, v: Any) -> Any:
    def loss(q: Any, k: Any, v: Any) -> Any:
        weights = ops.softmax(ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))), -1)
        return ops.mean(ops.square(ops.matmul(weights, v)))

    return ad.value_and_grad(loss, (0, 1, 2))(q, k, v)


def squeeze_excitation(squeeze: Any, excite: Any, x: Any) -> Any:
    def loss(squeeze: Any, excite: Any, x: Any) -> Any:
        weights = ops.sigmoid(ops.matmul(ops.relu(ops.matmul(ops.mean(x, (2, 3)), squeeze)), excite))
        return ops.mean(ops.square(x * ops.reshape(weights, (*weights.shape, 1, 1))))

    return ad.value_and_grad(loss, (0, 1, 2))(squeeze, excite, x)


def extremes_of_products(x: Any, y: Any) -> Any:
    return ops.max(x * y, (2, 3)), ops.min(x * y, (2, 3))


def test_the_gradient_of_a_softmax_by_heads_is_one_kernel() -> None:
    program = fused(attention, *[(4, 8, 256, 64)] * 3)
    (gradient,) = row_fused(program)
    assert inside(gradient) == ["sum"]
    scores = (4, 8, 256, 256)
    assert [v.type.shape for v in gradient.inputs].count(scores) == 2
    assert [v.type.shape for v in gradient.outputs] == [scores]
    others = (e for e in program.equations if e.form == LOOPS or e.name in ("sum", "reduction", "mul"))
    assert not [e for e in others if scores in {v.type.shape for v in e.outputs}]


def test_a_sum_for_each_image_and_one_over_all_images_read_the_images_once() -> None:
    shape = (64, 128, 28, 28)
    program = fused(squeeze_excitation, (128, 16), (16, 128), shape)
    readers = [e for e in program.equations if shape in {v.type.shape for v in e.inputs}]
    assert [e.name for e in readers] == ["sum", "row_fused", "loops"]
    assert inside(readers[1]) == ["sum", "sum"]
    assert [v.type.shape for v in readers[1].outputs] == [shape[:2], shape[:2]]


@pytest.mark.parametrize(
    ("f", "shapes"),
    [
        (attention, [(2, 3, 80, 64)] * 3),
        (squeeze_excitation, [(16, 8), (8, 16), (20, 16, 9, 8)]),
        (extremes_of_products, [(40, 7, 1, 1), (8, 9)]),
    ],
)
def test_kernels_of_general_programs_match_numpy(
    f: Any, shapes: list[Shape], host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusions, "LAUNCH_BYTES", 0)  # so small arrays are worth a launch
    assert check_kernels(fused(f, *shapes), [drawn(*shape) for shape in shapes], host, ROW_FUSED, TOLERANCE["float32"])


@pytest.mark.parametrize("name", ["sum", "max", "min"])
def test_a_reduction_over_rows_and_other_axes_is_split_if_a_large_array_is_then_read_once(name: str) -> None:
    def f(x: Any, y: Any) -> Any:
        return getattr(ops, name)(x * y), ops.sum(x, (2, 3)), getattr(ops, name)(x + y, (0, 2, 3))

    def read(shape: Shape) -> list[int]:
        program = fused(f, shape, shape)
        return [len(e.inputs) for e in program.equations if shape in {v.type.shape for v in e.inputs}]

    assert read((128, 64, 20, 16)) == [2]
    assert len(read((16, 8, 20, 16))) > 1


def test_a_reduction_whose_result_all_rows_need_is_not_split() -> None:
    def f(x: Any) -> Any:
        return ops.sum(x * ops.sum(x), (2, 3))

    program = fused(f, (128, 64, 20, 16))
    assert [e.params["axes"] for e in everywhere(program) if e.name == "sum"] == [(0, 1, 2, 3), (2, 3)]


def test_a_split_sum_stays_accurate(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusions, "LAUNCH_BYTES", 0)

    def f(x: Any) -> Any:
        return ops.sum(x), ops.sum(x * x, (2, 3))

    x = drawn(40, 10, 32, 32) + 1
    program = fused(f, x.shape)
    assert names(program) == ["row_fused", "sum"]
    known = {program.inputs[0]: x}
    for e in program.equations:
        known |= zip(e.outputs, host.computed(e, None, [known[v] for v in e.inputs]), strict=True)
    error = abs(known[program.outputs[0]] - x.sum(dtype=np.float64))
    assert error <= 4 * np.finfo(np.float32).eps * np.log2(x.size) * np.abs(x).sum(dtype=np.float64)


LEADING = [(216,), (12, 18), (8, 3, 9), (6, 1, 36), (2, 3, 4, 9)]
"""Lengths of the axes that count the rows."""
ROWS = [(64,), (1, 70), (8, 9), (5, 4, 4)]
"""Lengths of the axes of a row."""


def factor(*shape: int) -> np.ndarray:
    return drawn(*shape, dtype="float64")


LAYERS: dict[str, Any] = {
    "last axis of rows": lambda x, n: x * factor(*x.shape[n - 1 :]),
    "first axis of rows": lambda x, n: x + factor(x.shape[0], *(1,) * (n - 1), *x.shape[n:]),
    "number of a row": lambda x, n: x * factor(*x.shape[:n], *(1,) * (x.ndim - n)),
    "columns": lambda x, n: x - factor(*x.shape[n:]),
    "part of a row": lambda x, n: x * factor(x.shape[n], *(1,) * (x.ndim - n - 1)),
    "exp": lambda x, n: ops.exp(x * 0.1),
    "mean": lambda x, n: x - ops.mean(x * x, tuple(range(n, x.ndim)), keepdims=True),
    "max": lambda x, n: x / (1.0 + ops.square(ops.max(x, tuple(range(n, x.ndim)), keepdims=True))),
    "softmax": lambda x, n: x + ops.softmax(x, -1),
    "flat": lambda x, n: x + ops.reshape(ops.softmax(ops.reshape(x, (216, -1))), x.shape),
}
"""Functions of x, whose rows are behind n axes."""


@examples(2, 8)
def test_rows_behind_any_axes_match_numpy(examples: int, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusions, "LAUNCH_BYTES", 0)
    made: list[int] = []

    def check(leading: Shape, row: Shape, layers: Sequence[str]) -> None:
        def f(x: Any) -> Any:
            for name in layers:
                x = LAYERS[name](x, len(leading))
            return x, ops.sum(x, tuple(range(len(leading), x.ndim))), ops.sum(ops.square(x))

        def step(x: Any) -> Any:
            return f(x), ad.grad(lambda x: sum(ops.sum(ops.square(y)) for y in f(x)))(x)

        x = drawn(*leading, *row, dtype="float64")
        program = stage(step, passes.SIMPLIFY).program(x)
        improved = for_gpu(program)
        for found, expected in zip(NumpyProgram(improved).run([x])[0], NumpyProgram(program).run([x])[0], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9 * abs(np.asarray(expected)).max())
        made.append(check_kernels(improved, [x], host, ROW_FUSED, TOLERANCE["float64"]))

    layers = st.lists(st.sampled_from(sorted(LAYERS)), min_size=2, max_size=5)
    check_examples(examples, check, st.sampled_from(LEADING), st.sampled_from(ROWS), layers)
    assert sum(made) >= examples


def test_an_epilogue_of_a_convolution_stays_with_it() -> None:
    def f(x: Any, w: Any) -> Any:
        return ops.sum(ops.relu(ops.conv2d(x, w, padding=1)), (2, 3))

    assert names(fused(f, (64, 16, 20, 16), (32, 16, 3, 3)))[0] == "convolution"
