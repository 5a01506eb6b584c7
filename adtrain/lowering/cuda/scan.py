"""Running sums: `reduce/cumsum.cu`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from adtrain.core.kernel import WARP, CudaKernel, CudaLaunch, Target, memory_layout, register
from adtrain.lowering.cuda.reduce import MIN_BLOCKS, MIN_ROW_PART, of_one_member
from adtrain.lowering.shapes import output_type, split_at

BLOCK = 256
"""Threads per block."""
MANY_COLUMNS, MIN_COLUMN_PART = 1 << 18, 64
"""Threads, one per column, that keep the largest GPU busy; minimum of elements in a thread's part."""
TOTAL_BYTES = 8
"""Bytes of the sum of a part: double or int64_t."""


def cumsum(target: Target, x: Any, axis: int, reverse: bool) -> list[CudaKernel]:
    """The candidates: a block per row, or a thread per row or column.

    If there are too few of them, each is split into parts, and a first launch computes the sums of the parts.
    """
    outer, length, inner = split_at(x.shape, axis)
    dtypes = (x.dtype, output_type("cumsum", x, axis=axis, reverse=reverse).dtype)
    rows = inner == 1 and length > WARP  # contiguous, and long enough for a block
    wanted, min_part = (MIN_BLOCKS, MIN_ROW_PART) if rows else (MANY_COLUMNS, MIN_COLUMN_PART)
    parts = max(1, min(-(-wanted // max(of_one_member(target, x, outer * inner), 1)), length // min_part))
    part = max(-(-length // parts), 1)
    parts = -(-length // part)
    count = outer * inner * parts
    scratch = memory_layout("SCRATCH", {"SUMS": (TOTAL_BYTES, count)})

    def kernel(sums: str, name: str, **work: Any) -> CudaKernel:
        numbers = outer, length, inner, reverse, parts, part
        first = CudaLaunch("reduce/cumsum.cu", sums, numbers, dtypes, layouts=(scratch,), **work)
        last = replace(first, name=name)
        return CudaKernel((first, last), scratch) if parts > 1 else CudaKernel((last,), 0)

    columns = kernel("cumsum_column_sums", "cumsum_columns", elements=count)
    return [kernel("cumsum_sums", "cumsum_block", blocks=count, threads=BLOCK), columns] if rows else [columns]


register("cumsum", "cuda", cumsum)
