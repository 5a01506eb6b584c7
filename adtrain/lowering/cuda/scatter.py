"""scatter_add: a thread per element that compares all positions, or positions sorted by index (`index/scatter.cu`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.registry import register
from adtrain.core.target import Target
from adtrain.lowering import indexing
from adtrain.lowering.cuda.indexing import launch
from adtrain.lowering.cuda.reduce import vector_width

BLOCK, OFFSETS_BLOCK = 256, 1024
"""Threads per block of a sort, and of the block that computes prefix sums."""
MIN_SORTED, SORT_FIRST = 256, 1 << 27
"""Minimum of positions for which sorting is a candidate; minimum of comparisons for which it is the first one."""
DIGIT_BITS, SEGMENT = 8, 32
"""Of kernels/cuda/index/scatter.cu: bits of a digit (DIGITS), and positions of a segment."""
MAX_SORTS = 4
"""Keys have 32 bits."""
CHUNK, MAX_BLOCKS = 4096, 512
"""Positions of a block of a sort; maximum of blocks."""
ROWS, MAX_ROW_BYTES = (4, 2, 1), 64 << 10
"""Numbers of rows that a block of `sum_rows` may have; maximum bytes of several rows."""
ROW_THREADS = 512
"""Threads of a block of `sum_rows`."""


def scatter_add(target: Target, ct: Any, indices: Any, axis: int, length: int) -> list[CudaKernel]:
    """The candidates. Sorting is first for SORT_FIRST comparisons or more."""
    numbers = outer, length, inner, count = indexing.scatter_add(ct, indices, axis, length)
    compare = CudaKernel((launch("scatter_add", numbers, ct, indices, outer * length * inner),))
    sorts = -(-length.bit_length() // DIGIT_BITS)
    if count < MIN_SORTED or count >= 1 << 32 or not 1 <= sorts <= MAX_SORTS:
        return [compare]
    by_index = [kernel(target, numbers, ct, indices, sorts) for kernel in (_by_rows, _by_segments)]
    sorted_first = [kernel for kernel in by_index if kernel is not None]
    return [*sorted_first, compare] if math.prod(numbers) >= SORT_FIRST else [compare, *sorted_first]


def _by_rows(target: Target, numbers: indexing.Lengths, ct: Any, indices: Any, sorts: int) -> CudaKernel | None:
    """The kernel with rows of ct in shared memory; None unless inner is 1, a row fits, and there is one for each
    multiprocessor."""
    outer, length, inner, count = numbers
    size = count * int(ct.dtype.itemsize)
    if inner != 1 or outer < target.multiprocessors or size > target.shared:
        return None
    rows = next((rows for rows in ROWS if rows * size <= MAX_ROW_BYTES), 1)
    launches, scratch = _sort(numbers, ct, indices, sorts)
    starts = _step("list_starts", numbers, ct, indices, {"PASS": sorts}, elements=length + 1)
    blocks, shared = -(-outer // rows), rows * size
    macros = {
        "PASS": sorts,
        "ROWS": rows,
        "ROW_THREADS": ROW_THREADS,
        "WIDTH": vector_width(rows * count, ct.dtype.itemsize),
    }
    add = _step("sum_rows", numbers, ct, indices, macros, blocks=blocks, threads=ROW_THREADS, shared=shared)
    return CudaKernel((*launches, starts, add), scratch + 4 * (length + 1))


def _by_segments(target: Target, numbers: indexing.Lengths, ct: Any, indices: Any, sorts: int) -> CudaKernel:
    """The kernel that adds segments of the sorted positions, then the segments of each index."""
    outer, length, inner, count = numbers
    width = vector_width(inner, ct.dtype.itemsize)
    segments = -(-count // SEGMENT)
    sums = outer * segments * (inner // width)
    clear = _step("clear", numbers, ct, indices, {"WIDTH": width}, elements=outer * length * inner // width)
    launches, scratch = _sort(numbers, ct, indices, sorts)
    macros = {"PASS": sorts, "WIDTH": width}
    add = (_step(name, numbers, ct, indices, macros, elements=sums) for name in ("sum_segments", "join_segments"))
    return CudaKernel((clear, *launches, *add), scratch + outer * segments * 2 * inner * int(ct.dtype.itemsize))


def _sort(numbers: indexing.Lengths, ct: Any, indices: Any, sorts: int) -> tuple[list[CudaLaunch], int]:
    """The launches that sort the positions by index, and the bytes of their scratch memory."""
    count, blocks = numbers[-1], _blocks(numbers)
    launches = []
    for sort in range(sorts):
        for name, grid, threads in (
            ("sort_count", blocks, BLOCK),
            ("sort_offsets", 1, OFFSETS_BLOCK),
            ("sort_place", blocks, BLOCK),
        ):
            launches.append(_step(name, numbers, ct, indices, {"PASS": sort}, blocks=grid, threads=threads))
    return launches, 4 * (4 * (count + -count % 4) + (blocks << DIGIT_BITS))


def _blocks(numbers: indexing.Lengths) -> int:
    """The blocks of a sort."""
    return max(min(-(-numbers[-1] // CHUNK), MAX_BLOCKS), 1)


def _step(
    name: str, numbers: indexing.Lengths, ct: Any, indices: Any, macros: Mapping[str, int], **work: Any
) -> CudaLaunch:
    """A launch of `index/scatter.cu`; `work` is its grid, as arguments of `CudaLaunch`."""
    blocks = _blocks(numbers)
    given, dtypes = (*numbers, blocks, -(-numbers[-1] // blocks)), (ct.dtype, indices.dtype)
    return CudaLaunch("index/scatter.cu", name, given, dtypes, definitions=macros, checked=True, **work)


register("scatter_add", "cuda", scatter_add)
