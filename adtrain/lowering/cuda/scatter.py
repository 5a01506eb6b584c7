"""scatter_add: a thread per element that compares all positions, or positions sorted by index: `index/scatter.cu`."""

from __future__ import annotations

import math
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


def scatter_add(target: Target, ct: Any, indices: Any, axis: int, length: int) -> list[CudaKernel]:
    """The candidates. Sorting is first for SORT_FIRST comparisons or more."""
    numbers = outer, length, inner, count = indexing.scatter_add(ct, indices, axis, length)
    compare = CudaKernel((launch("scatter_add", numbers, ct, indices, outer * length * inner),))
    sorts = -(-length.bit_length() // DIGIT_BITS)
    if count < MIN_SORTED or count >= 1 << 32 or not 1 <= sorts <= MAX_SORTS:
        return [compare]
    by_index = _sorted(numbers, ct, indices, sorts)
    return [by_index, compare] if math.prod(numbers) >= SORT_FIRST else [compare, by_index]


def _sorted(numbers: indexing.Lengths, ct: Any, indices: Any, sorts: int) -> CudaKernel:
    outer, length, inner, count = numbers
    blocks = max(min(-(-count // CHUNK), MAX_BLOCKS), 1)
    width = vector_width(inner, ct.dtype.itemsize)
    segments = -(-count // SEGMENT)
    sums = outer * segments * (inner // width)

    def step(name: str, sort: int, **work: Any) -> CudaLaunch:
        given, macros = (*numbers, blocks, -(-count // blocks)), {"PASS": sort, "WIDTH": width}
        dtypes = (ct.dtype, indices.dtype)
        return CudaLaunch("index/scatter.cu", name, given, dtypes, definitions=macros, checked=True, **work)

    launches = [step("clear", 0, elements=outer * length * inner // width)]
    for sort in range(sorts):
        launches += [
            step("sort_count", sort, blocks=blocks, threads=BLOCK),
            step("sort_offsets", sort, blocks=1, threads=OFFSETS_BLOCK),
            step("sort_place", sort, blocks=blocks, threads=BLOCK),
        ]
    launches += [step("sum_segments", sorts, elements=sums), step("join_segments", sorts, elements=sums)]
    keys = 4 * (4 * (count + -count % 4) + (blocks << DIGIT_BITS))
    return CudaKernel(tuple(launches), keys + outer * segments * 2 * inner * int(ct.dtype.itemsize))


register("scatter_add", "cuda", scatter_add)
