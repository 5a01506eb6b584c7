"""Reductions whose argument is computed where it is needed: which equations they join, and their kernels on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, assert_same_in_another_order, host
from cuda_samples import Shaped
from hypothesis import strategies as st
from program_samples import ON_GPU, names
from sweeps import check_examples, examples

import adtrain as ad
from adtrain import ops
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.forms.column_sum import MAX_ROWS
from adtrain.backends.cuda.forms.reduction import REDUCTION
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Lowering
from adtrain.core.array import array
from adtrain.core.kernel import cuda_kernels
from adtrain.core.program import LOOPS, Equation, Program, body_of, fuse
from adtrain.core.staging import evaluate, stage
from adtrain.core.types import Shape
from adtrain.passes import SIMPLIFY

__all__ = ["host"]

pytestmark = pytest.mark.exhaustive

TOLERANCE = {"float32": 1e-6, "float64": 1e-14}
"""Of the largest element of the result, or of 1. Counts are exact."""
Function = Callable[..., Any]


def reduction(f: Function, name: str, axes: tuple[int, ...], *arrays: np.ndarray) -> Equation:
    """One equation that reduces f(*arrays)."""
    program = stage(lambda *xs: getattr(ops, name)(f(*xs), axes), SIMPLIFY).program(*map(array, arrays))
    return fuse(REDUCTION, program.equations, program.outputs, program.inputs)


def drawn(*shapes: Shape, dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def check(host: Host, equation: Equation, arrays: list[np.ndarray]) -> None:
    (expected,) = evaluate(body_of(equation), [array(x) for x in arrays])
    (found,) = host.computed(equation, None, arrays)
    y = expected.numpy()
    assert np.abs(found.reshape(y.shape) - y).max() <= TOLERANCE.get(y.dtype.name, 0) * max(np.abs(y).max(), 1)


def scaled(x: Any, row: Any, column: Any) -> Any:
    return ops.tanh(x * row + column) * x


def counted(x: Any, row: Any, column: Any) -> Any:
    return x * row > column


CASES = [
    ("reduce_lanes", scaled, "sum", (37, 64), (1,), "float32"),
    ("reduce_lanes", scaled, "sum", (1100, 3), (1,), "float32"),  # of an array, a thread would take each row
    ("reduce_warps", scaled, "max", (5, 401), (1,), "float32"),
    ("reduce_block", scaled, "min", (2, 3000), (1,), "float64"),
    ("reduce_block", scaled, "sum", (2, 40, 6, 50), (1, 3), "float32"),
    ("reduce_block_parts", scaled, "sum", (3, 20_001), (0, 1), "float32"),
    ("reduce_columns", scaled, "sum", (130, 12), (0,), "float64"),
    ("reduce_columns", counted, "sum", (6, 5, 16, 3), (0, 2), "float32"),
    ("reduce_columns_parts", scaled, "sum", (1100, 8), (0,), "float32"),
]


@pytest.mark.parametrize(("kernel", "f", "name", "shape", "axes", "dtype"), CASES)
def test_each_kernel_reduces_what_it_computes(
    kernel: str, f: Function, name: str, shape: Shape, axes: tuple[int, ...], dtype: str, host: Host
) -> None:
    arrays = drawn(shape, shape[1:], (*shape[:-1], 1), dtype=dtype)
    equation = reduction(f, name, axes, *arrays)
    launch = host.lowering.launches(equation)[0]
    assert isinstance(launch, LaunchPlan)
    assert launch.name == kernel
    check(host, equation, arrays)


def test_the_order_of_threads_does_not_change_a_sum(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = drawn((1100, 8), (8,), (1100, 1))
    equation = reduction(scaled, "sum", (0,), *arrays)
    assert_same_in_another_order(host, lambda: host.computed(equation, None, arrays), monkeypatch)


@st.composite
def reductions(draw: st.DrawFn) -> tuple[str, tuple[int, ...], list[Shape], str]:
    shape = draw(st.lists(st.sampled_from([2, 3, 4, 8, 12]), min_size=2, max_size=4).map(tuple))
    axes = draw(st.sets(st.integers(0, len(shape) - 1), min_size=1).map(lambda found: tuple(sorted(found))))
    operands = [tuple(draw(st.sampled_from([1, n])) for n in shape) for _ in range(2)]
    return draw(st.sampled_from(["sum", "max", "min"])), axes, [shape, *operands], draw(st.sampled_from([*TOLERANCE]))


@examples(3, 15)
def test_operands_broadcast_over_any_axes(examples: int, host: Host) -> None:
    def check_one(found: tuple[str, tuple[int, ...], list[Shape], str]) -> None:
        name, axes, shapes, dtype = found
        arrays = drawn(*shapes, dtype=dtype)
        check(host, reduction(scaled, name, axes, *arrays), arrays)

    check_examples(examples, check_one, reductions())


def on_gpu(f: Function, *shapes: Shape) -> Program:
    return stage(f, ON_GPU).program(*(Shaped(*shape) for shape in shapes))


def kept(program: Program) -> list[str]:
    """The names of the equations with more than one element in their results."""
    return [e.name for e in program.equations if e.outputs[0].size > 1]


def test_a_sum_over_more_rows_than_column_sums_take_is_fused() -> None:
    assert names(on_gpu(lambda x, y: ops.sum(x * y, 0), (2 * MAX_ROWS, 64), (2 * MAX_ROWS, 64))) == ["reduction"]


def test_a_sum_computes_its_argument_where_it_is_not_the_only_result() -> None:
    """The loops for the other result compute only that."""

    def f(x: Any, y: Any) -> Any:
        return ops.sum(x * y, (0, 1)), ops.exp(x * y)

    program = on_gpu(f, (2048, 2048), (2048, 1))
    assert sorted(kept(program)) == ["loops"]
    (loops,) = [e for e in program.equations if e.form == LOOPS]
    assert len(loops.outputs) == 1


def test_what_reductions_leave_of_loops_joins_the_loops_that_read_it() -> None:
    """A product with a factor by channel, its mean square and gradients: one loops equation has the whole array."""

    def f(x: Any, w: Any) -> Any:
        return ad.value_and_grad(lambda x, w: ops.mean((x * w) ** 2), argnums=(0, 1))(x, w)

    program = on_gpu(f, (64, 64, 32, 32), (64, 64, 1, 1))
    whole = [e for e in program.equations if any(v.size == 2**22 for v in e.outputs)]
    assert [e.name for e in whole] == ["loops"]
    assert [v.size for e in whole for v in e.inputs].count(2**22) == 1


def test_two_sums_of_one_value_compute_it_each() -> None:
    def f(x: Any) -> Any:
        square = x * x
        return ops.sum(square), ops.sum(square, (1, 2))

    assert names(on_gpu(f, (16, 512, 512))) == ["reduction", "reduction"]


def test_a_sum_reads_a_value_that_is_stored_for_others_where_its_arguments_are_larger() -> None:
    def f(x: Any, y: Any) -> Any:
        z = x * y
        return ops.sum(z), ops.transpose(z, (1, 0)) @ z

    assert "reduction" not in names(on_gpu(f, (2048, 2048), (2048, 2048)))


def test_a_sum_of_constants_has_no_argument_to_compute() -> None:
    def f(x: Any) -> Any:
        return ad.vjp(ops.log_softmax, x)[1](ops.full(x.shape, 2.0))

    program = on_gpu(f, (4, 70_000))
    assert "sum" in names(program)
    assert "reduction" not in names(program)


def test_loops_join_through_a_reshape_only_where_no_other_loops_follow(host: Host) -> None:
    """The rows of the one are not those of the other."""

    def f(x: Any, row: Any, other: Any) -> Any:
        return ops.sum(ops.reshape(x * row, (96, 1, 4000)) * other)

    program = on_gpu(f, (4, 1000, 96), (4, 1, 96), (96, 1, 1))
    (equation,) = [e for e in program.equations if e.form == REDUCTION]
    assert "reshape" not in names(body_of(equation))
    arrays = drawn(*(v.type.shape for v in equation.inputs))
    check(host, equation, arrays)


def test_the_epilogue_of_a_product_stays_with_the_product() -> None:
    def f(x: Any, w: Any) -> Any:
        return ops.sum(ops.relu(x @ w))

    assert sorted(names(on_gpu(f, (2048, 2048), (2048, 2048)))) == ["product", "sum"]


@pytest.mark.parametrize("op", [ops.softmax, ops.log_softmax])
@pytest.mark.parametrize(("shape", "axis"), [((300, 10), 1), ((3, 3000), 1), ((2, 700, 45), 1), ((2, 5, 3), 0)])
def test_softmax_of_lines_that_no_generated_kernel_takes(op: Function, shape: Shape, axis: int, host: Host) -> None:
    (x,) = drawn(shape)
    x[(0,) * x.ndim], x[(-1,) * x.ndim] = np.inf, -np.inf
    (e,) = stage(lambda x: op(x, axis), SIMPLIFY).program(array(x)).equations
    (kernel,) = cuda_kernels(e.primitive.name, H200, e.inputs[0].type, **e.params)
    (found,), expected = host.computed(e, kernel, [x]), op(array(x), axis).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(5, 3), (16, 64), (300, 1000), (132, 1025)])
@pytest.mark.parametrize("f", [lambda x: ops.softmax(x, 1), lambda x: ops.layer_norm(x, x.shape[1])])
def test_softmax_and_norms_that_share_no_kernel_read_rows_once(f: Function, shape: Shape, host: Host) -> None:
    (x,) = drawn(shape)
    program = stage(f, SIMPLIFY).program(array(x))
    (e,) = program.equations
    (launch,) = Lowering(H200).launches(e)
    assert isinstance(launch, LaunchPlan)
    assert launch.name in ("row_fused", "long_rows")
    found, (expected,) = host.computed(e, None, [x])[0], evaluate(program, [array(x)])
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-6)
