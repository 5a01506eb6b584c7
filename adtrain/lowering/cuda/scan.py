"""Running sums: `reduce/cumsum.cu`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from adtrain.core.kernel import LegacyKernel, legacy
from adtrain.core.registry import register
from adtrain.lowering.cuda.reduce import LEAST_ROW, MANY_BLOCKS, WARP
from adtrain.lowering.shapes import output_type, split_at

BLOCK = 256
"""Threads of a block."""
MANY_LINES, LEAST_LINE = 1 << 18, 64
"""Threads that keep the largest GPU busy with columns of running sums; the least elements of a thread's part."""


def cumsum(dtypes: Callable[..., Any]) -> tuple[LegacyKernel, ...]:
    """The candidates of a running sum: lines or columns, whole or, where there are few, in parts."""

    def lines(x: Any, axis: int, reverse: bool) -> int:
        outer, _, inner = split_at(x.shape, axis)
        return outer * inner

    def neighbours(x: Any, axis: int, reverse: bool) -> bool:
        """Whether lines are of neighbouring elements, and long enough to be shared."""
        _, length, inner = split_at(x.shape, axis)
        return inner == 1 and length > WARP

    def parts(x: Any, axis: int, reverse: bool) -> tuple[int, int]:
        """How many, and the elements in each."""
        length, found = x.shape[axis], lines(x, axis, reverse)
        wanted, least = (MANY_BLOCKS, LEAST_ROW) if neighbours(x, axis, reverse) else (MANY_LINES, LEAST_LINE)
        count = max(1, min(-(-wanted // max(found, 1)), length // least))
        chunk = max(-(-length // count), 1)
        return -(-length // chunk), chunk

    def numbers(x: Any, **params: Any) -> tuple[int, ...]:
        return *split_at(x.shape, params["axis"]), params["reverse"], *parts(x, **params)

    def work(x: Any, **params: Any) -> int:
        return lines(x, **params) * parts(x, **params)[0]

    def scratch(x: Any, **params: Any) -> int:
        return work(x, **params) * dtypes(x, **params)[-1].itemsize if parts(x, **params)[0] > 1 else 0

    def pair(sums: str, name: str, **launch: Any) -> tuple[LegacyKernel, LegacyKernel]:
        whole = LegacyKernel("reduce/cumsum.cu", name, numbers, dtypes, scratch=scratch, **launch)
        return replace(whole, name=sums, then=whole, applies=lambda x, **params: parts(x, **params)[0] > 1), whole

    in_blocks = pair("cumsum_sums", "cumsum_block", blocks=work, threads=lambda x, **params: BLOCK)
    both = [
        replace(k, applies=lambda x, k=k, **params: neighbours(x, **params) and k.applies(x, **params))
        for k in in_blocks
    ]
    return *both, *pair("cumsum_column_sums", "cumsum_columns", elements=work)


register("cumsum", "cuda", legacy(cumsum(lambda x, **params: (x.dtype, output_type("cumsum", x, **params).dtype))))
