"""Odd sizes, and sizes that other algorithms take, on a GPU against the CPU."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import pytest
from compiled_parity import Function
from gpu_parity import TOLERANCE, check, gpu, poisoned
from test_cpu_shapes import FAMILIES, Draw, integers, with_gradients

from adtrain import ops
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.core.trace import bind
from adtrain.ops.normalisation import standardize_p

__all__ = ["gpu", "poisoned"]

pytestmark = pytest.mark.gpu

TAKEN = {"float32": (0, 2, 4), "float64": (1, 3)}
"""The functions that are run without exhaustive tests, of five that follow one another. Each has kernels of its own, of
the same text in both types. Of the families in WHOLE, all are run."""


def large_reductions(draw: Draw) -> Iterator[tuple[str, Function]]:
    """Few outputs of many elements, which are split; many outputs of few; rows of every alignment, and columns."""
    many: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((300_001,), (0,)), ((3, 100_003), (1,)), ((100_003, 3), (0,)), ((70_001, 1), (0,)), ((65, 1025), (1,)),
        ((1025, 65), (0,)), ((5, 33, 4097), (0, 2)), ((33, 5, 65, 3), (0, 2)), ((2, 3, 2, 3, 2, 3), (0, 2, 4)),
        ((2, 3, 2, 3, 2, 3), (1, 3, 5)), ((40_000, 7), (1,)), ((2, 20_000, 2), (1,)), ((1, 1, 9), (0,)),
        ((128, 33), (0,)), ((3, 129, 40), (1,)), ((3, 2000, 40), (0, 1)), ((2000, 7), (1,)), ((1025, 10), (1,)),
        ((300, 64), (1,)), ((40_000, 64), (0,)), ((8, 4100), (0,)), ((30, 3, 49), (0, 2)), ((9, 3, 2500), (0, 2)),
        ((8193, 1027), (1,)), ((65, 101), (1,)), ((400, 11, 7, 7), (0, 2, 3)), ((3, 70, 4, 50, 3), (0, 2, 4)),
    ]  # fmt: skip
    for shape, axes in many:
        for f in (ops.sum, ops.max, ops.min):
            yield f"{f.__name__} {shape} {axes}", (lambda x, f=f, axes=axes: f(x, axes), [draw(*shape)])
    few: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((3, 5000), (1,)), ((9, 3, 700), (0, 2)), ((5000, 3), (0,))]
    for shape, axes in few:
        yield f"logsumexp {shape}", (lambda x, axes=axes: ops.logsumexp(x, axes), [draw(*shape)])


def long_rows(draw: Draw) -> Iterator[tuple[str, Function]]:
    for shape, axis in [
        ((7, 1024), 1),
        ((7, 1025), 1),
        ((2, 5000), 1),
        ((3, 20_001), 1),
        ((300, 7), 0),
        ((40_000, 3), 1),
        ((1500, 10), 1),
        ((1025, 31), 1),
        ((33, 100), 1),
        ((5, 2048), 1),
        ((9, 1001), 1),
        ((3, 40_003), 1),
        ((2, 70_001), 1),
        ((2, 131_072), 1),
        ((2, 9, 300), 1),
        ((2, 200, 40), 1),
        ((3, 1000, 9), 1),
    ]:
        for f in (ops.softmax, ops.log_softmax, ops.cumsum, ops.argmax):
            yield f"{f.__name__} {shape} {axis}", (lambda x, f=f, axis=axis: f(x, axis), [draw(*shape)])
    for shape in [(7, 1024), (7, 1025), (3, 20_001), (1, 300_000), (40_000, 3)]:
        x = np.round(draw(*shape) * 50)  # equal elements too
        yield f"sort {shape}", (lambda x: (ops.argsort(x), *ops.topk(x, 3), ops.sort(x, 0)), [x])
    for rows in [(5, 3000), (2, 33, 40)]:
        yield f"layer_norm {rows}", (with_gradients(lambda x: ops.layer_norm(x, x.shape[-1])), [draw(*rows)])


def copies(draw: Draw) -> Iterator[tuple[str, Function]]:
    """Through tiles, and element by element."""
    for shape, axes in [
        ((65, 33), (1, 0)), ((3, 40, 50), (0, 2, 1)), ((40, 3, 50), (2, 1, 0)), ((9, 10, 11, 12), (3, 1, 0, 2)),
        ((2, 3, 4, 5, 6, 7), (5, 3, 1, 4, 2, 0)), ((7, 100), (1, 0)), ((1000, 1200), (1, 0)), ((8, 1, 9), (2, 1, 0)),
    ]:  # fmt: skip
        yield f"transpose {shape} {axes}", (lambda x, axes=axes: ops.transpose(x, axes), [draw(*shape)])
    yield (
        "whole vectors",
        (
            lambda x: (
                ops.flip(x),
                ops.flip(x, 0),
                x[:, 4:-4],
                ops.concatenate([x, x], 1),
                ops.pad(x, ((0, 1), (8, 4)), 1.5),
            ),
            [draw(33, 64)],
        ),
    )
    yield "gaps", (with_gradients(lambda x: x[1::3, ::2]), [draw(20, 51)])
    yield "flip", (lambda x: (ops.flip(x), ops.flip(x, 0), ops.transpose(ops.flip(x, 1))), [draw(33, 70)])
    yield "pad", (lambda x: ops.pad(x, ((3, 1), (0, 2), (5, 0)), 2.5), [draw(9, 8, 7)])
    yield "slices", (lambda x: (x[1::3, ::-2], x[:, 5], x[..., 3:40:7]), [draw(20, 50, 60)])
    yield "join", (lambda *xs: ops.concatenate(xs, 2), [draw(3, 4, 5), draw(3, 4, 65), draw(3, 4, 1)])


def scattered(draw: Draw) -> Iterator[tuple[str, Function]]:
    for shape, count, axis in [((50, 7), 300, 0), ((7, 50), 33, 1), ((3, 20, 5), 64, 1)]:
        at = np.random.default_rng(1).integers(0, shape[axis], count)
        yield f"take {shape}", (with_gradients(lambda x, at=at, axis=axis: ops.take(x, at, axis)), [draw(*shape)])


def scattered_along(draw: Draw) -> Iterator[tuple[str, Function]]:
    """One index per row, and several with duplicates."""
    for shape, count, axis in [
        ((50, 12), 1, 1),
        ((7, 5, 3), 1, 1),
        ((40, 9), 1, 0),
        ((33, 16), 5, 1),
        ((4, 6, 10), 9, 1),
    ]:
        at_shape = (*shape[:axis], count, *shape[axis + 1 :])
        at = np.random.default_rng(3).integers(0, shape[axis], at_shape)
        f = with_gradients(lambda x, at=at, axis=axis: ops.take_along_axis(x, at, axis))
        yield f"take_along_axis {shape} {axis}", (f, [draw(*shape)])


def sorted_positions(draw: Draw) -> Iterator[tuple[str, Function]]:
    """Enough indices for a sort of several tiles: distinct, repeated, and all the same."""
    numbers = np.random.default_rng(2)
    for shape, count, axis in [
        ((250, 64), 9000, 0),
        ((4000, 12), 9001, 0),
        ((3, 70_000, 2), 700, 1),
        ((301, 500), 1300, 1),
        ((140, 300), 20_000, 1),
    ]:
        for at in (numbers.integers(0, shape[axis], count), np.full(count, 3), numbers.integers(0, 9, count) ** 2):
            f = with_gradients(lambda x, at=at, axis=axis: ops.take(x, at, axis))
            yield f"take {count} of {shape}", (f, [draw(*shape)])


def statistics(draw: Draw) -> Iterator[tuple[str, Function]]:
    for shape in [(5, 3, 8, 8), (40, 2, 7, 7), (300, 33), (9000, 3), (2, 3, 90, 90), (1, 2, 30_000), (70, 5, 40, 9)]:
        axes = tuple(i for i in range(len(shape)) if i != 1)
        yield f"standardize {shape}", (lambda x, axes=axes: bind(standardize_p, x, axes=axes, eps=1e-5), [draw(*shape)])
    for shape, axes in [((2000, 10), (1,)), ((7, 1100), (1,)), ((40, 70), (0,)), ((4, 3, 50), (0, 2))]:
        yield f"logsumexp {shape}", (lambda x, axes=axes: ops.logsumexp(x, axes), [draw(*shape)])
    for shape in [(7, 2500), (2500, 7), (1100, 9), (100_000,)]:
        yield (
            f"whole numbers {shape}",
            (
                lambda x: [
                    (ops.sum(y, i), ops.max(y, i), ops.argmax(y, i))
                    for y in (x > 0, ops.astype(x * 50, "uint8"))
                    for i in range(x.ndim)
                ],
                [draw(*shape) ** 2],
            ),
        )


def pooled(draw: Draw) -> Iterator[tuple[str, Function]]:
    """Windows that overlap, touch, or have gaps, on images whose rows divide into vectors or not."""
    for shape in [(2, 3, 16, 16), (1, 2, 13, 15), (2, 1, 30, 17)]:
        for window in [(2, 2, 0), (3, 2, 1), (3, 1, 1), (2, 3, 0), (5, 3, 2), (4, 4, 1), (3, 5, 0), (2, 4, 1)]:
            for f in (ops.max_pool2d, ops.avg_pool2d):
                call = with_gradients(lambda x, f=f, window=window: f(x, *window))
                yield f"{f.__name__} {shape} {window}", (call, [draw(*shape)])


def vectors(draw: Draw) -> Iterator[tuple[str, Function]]:
    """Every remainder of a vector, and broadcasts along each axis of rows that divide into vectors or not."""
    for n in (1, 2, 3, 4, 5, 8, 1023, 4096, 100_001):
        yield (
            f"elements {n}",
            (lambda x, y: (ops.tanh(x) * y, ops.less(x, y), ops.astype(x, "uint8")), [draw(n) ** 2, draw(n)]),
        )
    for shape in [(17, 64), (17, 63), (3, 5, 8), (2, 3, 4, 4)]:
        whole = draw(*shape)
        for other in [shape[1:], (*shape[:-1], 1), (shape[0], *[1] * (len(shape) - 1)), (1,) * len(shape)]:
            yield f"{shape} {other}", (lambda x, y: ops.exp(x) + y * x, [whole, draw(*other)])


WHOLE = (integers, long_rows)
"""Families in which one function each has a kernel for a type of elements or indices."""
OWN = [large_reductions, long_rows, copies, scattered, scattered_along, sorted_positions, statistics, pooled, vectors]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "taken"),
    [*TAKEN.items(), *(pytest.param(dtype, range(5), marks=pytest.mark.exhaustive) for dtype in TAKEN)],
    ids=[*TAKEN, *(f"{dtype}, all" for dtype in TAKEN)],
)
@pytest.mark.parametrize("family", [*FAMILIES, *OWN])
def test_odd_and_large_sizes_match_the_cpu(family: Any, dtype: str, taken: Collection[int]) -> None:
    wrong = []
    functions = enumerate(family(Draw(dtype)))
    for name, (f, args) in (function for i, function in functions if i % 5 in taken or family in WHOLE):
        expected = [x.numpy() for x in tree.leaves(f(*(array(x) for x in args)))]
        try:
            found = [x.numpy() for x in tree.leaves(f(*(array(x).to("gpu") for x in args)))]
            check(found, expected, 10 * TOLERANCE[dtype])
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {str(error).strip()[:400]}")
    assert not wrong, f"{len(wrong)} wrong: " + "\n\n".join(wrong[:5])
