"""Thread items: which equations become one kernel, and these kernels on the CPU against NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, check_kernels, host
from cuda_samples import Shaped
from program_samples import everywhere, for_gpu, names

import adtrain as ad
from adtrain import ops
from adtrain.backends.cuda.codegen import thread_items as generator
from adtrain.backends.cuda.forms import row_fused, thread_items
from adtrain.backends.cuda.forms.thread_items import THREAD_ITEMS
from adtrain.core.program import Program
from adtrain.core.staging import stage
from adtrain.core.types import Shape

__all__ = ["host"]

MANY = thread_items.MIN_ITEMS
TOLERANCE = {"float32": 3e-6, "float64": 1e-13}
"""Maximum norm of the error over the norm of the result."""


def fused(f: Callable[..., Any], *shapes: Shape, dtype: str = "float32") -> Program:
    return for_gpu(stage(f).program(*(Shaped(*shape, dtype=dtype) for shape in shapes)))


def transposed(x: Any) -> Any:
    return ops.transpose(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def second_derivative_of_a_network(x: Any, w: Any, b: Any, out: Any) -> Any:
    def u(x: Any) -> Any:
        return ops.tanh(ops.tanh(x) @ (w * 0.1) + b) @ out

    def by_x(x: Any) -> Any:
        return ad.grad(lambda x: ops.sum(u(x)))(x)

    return ad.grad(lambda x: ops.sum(by_x(x)))(x)


def taylor_series_of_a_network(x: Any, w: Any, b: Any, out: Any) -> Any:
    def u(x: Any) -> Any:
        return ops.tanh(ops.tanh(x) @ (w * 0.1) + b) @ out

    value, (first, second) = ad.jet(u, (x,), [(ops.ones_like(x),), None])
    return value, first, second


def step_of_a_filter(model: Any, noise: Any, x: Any, p: Any) -> Any:
    """The prediction of a Kalman filter, and the inverse of a part of its covariance."""
    x, p = model @ x, model @ p @ transposed(model) + noise
    s = p[:, :2, :2]
    a, b, c, d = s[:, 0, 0], s[:, 0, 1], s[:, 1, 0], s[:, 1, 1]
    inverse = ops.reshape(ops.stack([d, -b, -c, a], 1), (-1, 2, 2)) / (a * d - b * c)[:, None, None]
    gain = p[:, :, :2] @ inverse
    return x + gain @ x[:, :2], p - gain @ p[:, :2, :], ops.sum(gain, (1, 2))


def nearest(x: Any, centres: Any) -> Any:
    squares = ops.sum(x * x, 1)[:, None] - 2.0 * (x @ transposed(centres)) + ops.sum(centres * centres, 1)
    return ops.min(squares, 1), ops.max(squares, 1), ops.softmax(squares, 1), ops.log_softmax(-squares, 1)


def mixture(x: Any, means: Any, scales: Any) -> Any:
    """The logarithm of the likelihood of a Gaussian mixture."""
    z = (x[:, None, :] - means) / scales
    return ops.logsumexp(-ops.sum(z * z, 2), 1)


def moves(x: Any, y: Any) -> Any:
    """Each of `MOVES`, on items of several pieces."""
    x = ops.exp(x)
    wide = ops.concatenate([x, y * 2.0, x], 1)
    padded = ad.grad(lambda x: ops.sum(ops.square(x[:, 1:9:2])))(x)
    return wide, padded, ops.transpose(ops.reshape(x, (-1, 2, 8)), (0, 2, 1)), x > 2.5


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[int], Sequence[Shape]]]] = {
    "network": (second_derivative_of_a_network, lambda n: [(n, 5), (5, 12), (12,), (12, 3)]),
    "taylor": (taylor_series_of_a_network, lambda n: [(n, 5), (5, 12), (12,), (12, 3)]),
    "filter": (step_of_a_filter, lambda n: [(4, 4), (4, 4), (n, 4, 1), (n, 4, 4)]),
    "nearest": (nearest, lambda n: [(n, 6), (9, 6)]),
    "mixture": (mixture, lambda n: [(n, 3), (7, 3), (7, 3)]),
    "moves": (moves, lambda n: [(n, 16), (n, 7)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_small_items_is_one_kernel(name: str) -> None:
    f, shapes = PROGRAMS[name]
    program = fused(f, *shapes(MANY))
    large = [e for e in program.equations if any(v.size >= MANY for v in (*e.inputs, *e.outputs))]
    assert [e.form for e in large if not e.is_view] == [THREAD_ITEMS]


def test_programs_of_few_items_or_large_items_have_other_kernels() -> None:
    assert THREAD_ITEMS not in names(fused(nearest, (MANY // 2, 6), (9, 6)))
    program = fused(nearest, (MANY, 128), (9, 128))
    sizes = [v.size // MANY for e in program.equations if e.form == THREAD_ITEMS for v in (*e.inputs, *e.outputs)]
    assert max(sizes) == 9


def test_a_long_chain_becomes_kernels_that_keep_the_limit_of_operations() -> None:
    def layers(x: Any, w: Any) -> Any:
        for _ in range(24):
            x = ops.tanh(x @ w)
        return x

    program = fused(layers, (MANY, 20), (20, 20))
    assert names(program) == [THREAD_ITEMS] * 6
    for e in program.equations:
        own = e.params["body"].equations
        assert sum(generator.operations(x, MANY) for x in own) <= thread_items.MAX_OPERATIONS
    assert len([e for e in everywhere(program) if e.name == "matmul"]) == 24


def test_broadcasts_do_not_count_as_operations() -> None:
    """If they did, this mixture would exceed the limit of operations."""
    program = fused(mixture, (MANY, 16), (32, 16), (32, 16))
    large = [e for e in program.equations if any(v.size >= MANY for v in (*e.inputs, *e.outputs))]
    assert [e.form for e in large if not e.is_view] == [THREAD_ITEMS]


def test_reductions_over_the_items_compute_their_arguments_from_one_stored_array() -> None:
    def f(x: Any, w: Any) -> Any:
        y = ops.softmax(ops.tanh(x @ w), 1)
        return ops.sum(y * y, 0), ops.sum(-y)

    program = fused(f, (MANY, 8), (8, 8))
    (items,) = [e for e in program.equations if e.form == THREAD_ITEMS]
    assert len(items.outputs) == 1
    assert sorted(names(program)) == ["column_sum", "reduction", THREAD_ITEMS]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("name", "count"), [*zip(PROGRAMS, (33, 65, 300, 257, 64, 129), strict=True)])
def test_kernels_for_any_number_of_items_match_numpy(name: str, count: int, dtype: str, host: Host) -> None:
    f, shapes = PROGRAMS[name]
    rng = np.random.default_rng(count)
    arrays = [rng.uniform(0.5, 1.5, shape).astype(dtype) for shape in shapes(count)]
    with pytest.MonkeyPatch.context() as patch:
        for module in (thread_items, row_fused):
            patch.setattr(module, "MIN_ITEMS", 32)
        assert check_kernels(fused(f, *shapes(count), dtype=dtype), arrays, host, THREAD_ITEMS, TOLERANCE[dtype])
