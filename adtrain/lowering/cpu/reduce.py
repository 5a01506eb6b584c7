"""Sums, extremes, argmax, running sums, softmax and normalisation: `sum.c`, `max.c`, `min.c`, `argmax.c`, `cumsum.c`,
`softmax.c` and `norm.c`."""

from __future__ import annotations

from typing import Any

import numpy as np

from adtrain.core.kernel import CKernel, register
from adtrain.lowering.cpu.shapes import item_and_team
from adtrain.lowering.shapes import alternating, output_type, split_at

TEAM_SCRATCH = 64 * 64 * 8
"""Bytes that all threads need for a reduction: MAX_SPLIT_OUTPUTS * PARTS doubles in `kernels/cpu/reduce.h`."""


def lengths(x: Any, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The lengths that `kernels/cpu/reduce.h` takes."""
    return alternating(x.shape, axes, 6)


def _sum_dtypes(x: Any, axes: tuple[int, ...]) -> tuple[np.dtype, ...]:
    return x.dtype, output_type("sum", x, axes=axes).dtype


def _cumsum_numbers(x: Any, axis: int, reverse: bool) -> tuple[int, ...]:
    return *split_at(x.shape, axis), int(reverse)


def _cumsum_dtypes(x: Any, axis: int, reverse: bool) -> tuple[np.dtype, ...]:
    return x.dtype, output_type("cumsum", x, axis=axis, reverse=reverse).dtype


register(
    "sum",
    "cpu",
    (
        *item_and_team("sum.c", "sum", lengths, _sum_dtypes, TEAM_SCRATCH),
        CKernel("sum.c", "sum_into", lengths, _sum_dtypes, items=True, several_items=True, sums=True),
    ),
)
register("max", "cpu", item_and_team("max.c", "max", lengths, scratch=TEAM_SCRATCH))
register("min", "cpu", item_and_team("min.c", "min", lengths, scratch=TEAM_SCRATCH))
register("argmax", "cpu", item_and_team("argmax.c", "argmax", lambda x, axis: split_at(x.shape, axis)))
register("cumsum", "cpu", item_and_team("cumsum.c", "cumsum", _cumsum_numbers, _cumsum_dtypes))


register(
    "softmax",
    "cpu",
    item_and_team("softmax.c", "softmax", lambda x, axis: (*split_at(x.shape, axis), 0)),
)
register(
    "log_softmax",
    "cpu",
    item_and_team("softmax.c", "softmax", lambda x, axis: (*split_at(x.shape, axis), 1)),
)
register("logsumexp", "cpu", item_and_team("softmax.c", "logsumexp", lengths))


def _standardize_numbers(x: Any, axes: tuple[int, ...], eps: float) -> tuple[int | float, ...]:
    return *alternating(x.shape, axes, 4), float(eps)


register("standardize", "cpu", item_and_team("norm.c", "standardize", _standardize_numbers))
