"""Gathers, scatters, one_hot, argsort and random numbers: `index/index.cu`, `scatter.cu`, `sort.cu` and `random.cu`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from adtrain.core.kernel import MAX_GRID, CudaKernel, CudaLaunch
from adtrain.core.memory_layout import MemoryLayout, lengths, memory_layout
from adtrain.core.registry import register
from adtrain.core.target import Target
from adtrain.lowering import layouts
from adtrain.lowering.cuda.reduce import WARP, of_one_member, power_of_two, vector_width


def launch(name: str, numbers: layouts.Lengths, x: Any, indices: Any, elements: int, width: int = 1) -> CudaLaunch:
    """A kernel of an array and indices, with ``elements`` vectors of ``width`` to compute."""
    dtypes, macros = (x.dtype, indices.dtype), {"WIDTH": width}
    return CudaLaunch("index/index.cu", name, numbers, dtypes, elements, definitions=macros, checked=True)


def take(target: Target, x: Any, indices: Any, axis: int) -> list[CudaKernel]:
    numbers = outer, _, inner, count = layouts.take(x, indices, axis)
    width = vector_width(inner, x.dtype.itemsize)
    return [CudaKernel((launch("take", numbers, x, indices, outer * inner * count // width, width),))]


def take_along_axis(target: Target, x: Any, indices: Any, axis: int) -> list[CudaKernel]:
    numbers = outer, _, inner, count = layouts.take_along_axis(x, indices, axis)
    return [CudaKernel((launch("take_along_axis", numbers, x, indices, outer * inner * count),))]


def scatter_along_axis(target: Target, ct: Any, indices: Any, axis: int, length: int) -> list[CudaKernel]:
    """The candidates: one pass, where there is one index per row; or zeros, then a thread per row that adds."""
    numbers = outer, _, inner, count = layouts.scatter_along_axis(ct, indices, axis, length)
    width = vector_width(inner if inner > 1 else length, ct.dtype.itemsize)
    clear = launch("clear_along_axis", numbers, ct, indices, outer * length * inner // width, width)
    add = launch("scatter_along_axis", numbers, ct, indices, outer * inner)
    one_pass = CudaKernel((replace(clear, name="scatter_one"),))
    return [*([one_pass] if count == 1 else []), CudaKernel((clear, add))]


COPIED_BY_THREAD = 64
"""Vectors that a thread of `put_rows` copies where the result has memory of its own."""


def put_rows(target: Target, x: Any, rows: Any, positions: Any, axis: int) -> list[CudaKernel]:
    numbers = outer, before, length, inner = layouts.put_rows(x, rows, positions, axis)
    width = vector_width(inner, x.dtype.itemsize)
    vectors = outer * before * inner // width
    elements = max(vectors, vectors * length // COPIED_BY_THREAD)
    return [CudaKernel((launch("put_rows", numbers, x, positions, elements, width),))]


def one_hot(target: Target, indices: Any, num_classes: int, dtype: np.dtype) -> list[CudaKernel]:
    count = math.prod(indices.shape)
    numbers, dtypes = (count, num_classes), (dtype, indices.dtype)
    return [CudaKernel((CudaLaunch("index/index.cu", "one_hot", numbers, dtypes, count * num_classes, checked=True),))]


register("take", "cuda", take)
register("take_along_axis", "cuda", take_along_axis)
register("scatter_along_axis", "cuda", scatter_along_axis)
register("put_rows", "cuda", put_rows)
register("one_hot", "cuda", one_hot)


BLOCK, OFFSETS_BLOCK = 256, 1024
"""Threads per block of a sort, and of the block that computes prefix sums."""
MIN_SORTED, SORT_FIRST = 256, 1 << 27
"""Minimum of positions for which sorting is a candidate; minimum of comparisons for which it is the first one."""
DIGIT_BITS, SEGMENT = 8, 32
"""Bits of a digit, as in `index/scatter.cu`; maximum of positions of a segment."""
DIGITS = 1 << DIGIT_BITS
"""Values of a digit."""
MAX_SORTS = 4
"""Keys have 32 bits."""
CHUNK, MAX_BLOCKS = 4096, 512
"""Positions of a block of a sort; maximum of blocks."""
ROWS, MAX_ROW_BYTES = (4, 2, 1), 64 << 10
"""Numbers of rows that a block of `sum_rows` may have; maximum bytes of several rows."""
ROW_THREADS = 512
"""Threads of a block of `sum_rows`."""


def scatter_add(target: Target, ct: Any, indices: Any, axis: int, length: int) -> list[CudaKernel]:
    """The candidates. Sorting is first for SORT_FIRST comparisons or more.

    In a Program by member, the choice is made for the numbers of one member. If each has indices of its own, those of
    all members are one axis (`ops/index.py`). Then comparing all positions would take too long, and segments divide
    the positions of each member. There is no kernel if that axis has too many indices for 32 bits.
    """
    numbers = outer, length, inner, count = layouts.scatter_add(ct, indices, axis, length)
    merged = target.by_member and axis == 0 and len(indices.shape) > 0
    segment = math.gcd(math.prod(indices.shape[1:]), SEGMENT) if merged else SEGMENT
    one = of_one_member(target, ct, outer), length, inner, count
    compare = CudaKernel((launch("scatter_add", numbers, ct, indices, outer * length * inner),))
    sorts = -(-length.bit_length() // DIGIT_BITS)
    sortable = count < 1 << 32 and 1 <= sorts <= MAX_SORTS
    if merged and not sortable:
        return []  # the kernel of a member must not depend on the number of members
    if not sortable or (count < MIN_SORTED and not merged):
        return [compare]
    by_rows = _by_rows(target, numbers, ct, indices, sorts) if one[0] >= target.multiprocessors else None
    by_segments = _by_segments(numbers, ct, indices, sorts, segment)
    sorted_first = [by_segments] if by_rows is None else [by_rows, by_segments]
    return [*sorted_first, compare] if merged or math.prod(one) >= SORT_FIRST else [compare, *sorted_first]


def _by_rows(target: Target, numbers: layouts.Lengths, ct: Any, indices: Any, sorts: int) -> CudaKernel | None:
    """The kernel with rows of ct in shared memory; None unless inner is 1 and a row fits."""
    outer, length, inner, count = numbers
    size = count * int(ct.dtype.itemsize)
    if inner != 1 or size > target.shared:
        return None
    rows = next((rows for rows in ROWS if rows * size <= MAX_ROW_BYTES), 1)
    launches = _sort(numbers, ct, indices, sorts)
    starts = _step("list_starts", numbers, ct, indices, {"PASS": sorts}, elements=length + 1)
    blocks, shared = -(-outer // rows), rows * size
    macros = {
        "PASS": sorts,
        "ROWS": rows,
        "ROW_THREADS": ROW_THREADS,
        "WIDTH": vector_width(rows * count, ct.dtype.itemsize),
    }
    add = _step("sum_rows", numbers, ct, indices, macros, blocks=blocks, threads=ROW_THREADS, shared=shared)
    return CudaKernel((*launches, starts, add), _scratch(numbers, ct, starts=length + 1))


def _by_segments(numbers: layouts.Lengths, ct: Any, indices: Any, sorts: int, segment: int) -> CudaKernel:
    """The kernel that adds segments of so many of the sorted positions, then the segments of each index."""
    outer, length, inner, count = numbers
    width = vector_width(inner, ct.dtype.itemsize)
    segments = -(-count // segment)
    sums = outer * segments * (inner // width)
    clear = _step("clear", numbers, ct, indices, {"WIDTH": width}, elements=outer * length * inner // width)
    launches = _sort(numbers, ct, indices, sorts)
    macros = {"PASS": sorts, "SEGMENT": segment, "WIDTH": width}
    add = (_step(name, numbers, ct, indices, macros, elements=sums) for name in ("sum_segments", "join_segments"))
    return CudaKernel((clear, *launches, *add), _scratch(numbers, ct, sums=outer * segments * 2 * inner))


def _sort(numbers: layouts.Lengths, ct: Any, indices: Any, sorts: int) -> list[CudaLaunch]:
    """The launches that sort the positions by index."""
    blocks = _blocks(numbers)
    launches = []
    for sort in range(sorts):
        for name, grid, threads in (
            ("sort_count", blocks, BLOCK),
            ("sort_offsets", 1, OFFSETS_BLOCK),
            ("sort_place", blocks, BLOCK),
        ):
            launches.append(_step(name, numbers, ct, indices, {"PASS": sort}, blocks=grid, threads=threads))
    return launches


def _scratch(numbers: layouts.Lengths, ct: Any, starts: int = 0, sums: int = 0) -> MemoryLayout:
    """The layout of scratch, with so many starts of `sum_rows`, or so many sums of segments."""
    count, blocks = lengths(count=numbers[-1], blocks=_blocks(numbers))
    arrays = {name: (4, count.rounded_up(4)) for name in ("KEYS", "NEXT_KEYS", "POSITIONS", "NEXT_POSITIONS")}
    last = {"STARTS": (4, starts), "SEGMENTS": (int(ct.dtype.itemsize), sums)}
    return memory_layout("SCRATCH", {**arrays, "COUNTS": (4, blocks * DIGITS), **last}, count, blocks)


def _blocks(numbers: layouts.Lengths) -> int:
    """The blocks of a sort."""
    return max(min(-(-numbers[-1] // CHUNK), MAX_BLOCKS), 1)


def _step(
    name: str, numbers: layouts.Lengths, ct: Any, indices: Any, macros: Mapping[str, int], **work: Any
) -> CudaLaunch:
    """A launch of `index/scatter.cu`; `work` is its grid, as arguments of `CudaLaunch`."""
    blocks = _blocks(numbers)
    given, dtypes = (*numbers, blocks, -(-numbers[-1] // blocks)), (ct.dtype, indices.dtype)
    work |= {"definitions": macros, "layouts": (_scratch(numbers, ct),), "checked": True}
    return CudaLaunch("index/scatter.cu", name, given, dtypes, **work)


register("scatter_add", "cuda", scatter_add)


MAX_TILE = 1024
"""Maximum of positions that a block sorts: one for each thread."""
INDEX = np.dtype(np.int64)


def argsort(target: Target, x: Any, count: int, descending: bool) -> list[CudaKernel]:
    """The only candidate: sorts tiles, then merges pairs of runs until one run is left."""
    rows, length = math.prod(x.shape[:-1]), x.shape[-1]
    tile = min(max(power_of_two(length), WARP), MAX_TILE)
    tiles = -(-length // tile)
    launches = 1 + max(tiles - 1, 0).bit_length()
    macros = {"TILE": tile, "DESCENDING": int(descending)}
    scratch = memory_layout("SCRATCH", {"LISTS": (INDEX.itemsize, min(launches - 1, 2) * rows * length)})

    def launch(name: str, *numbers: int, **work: Any) -> CudaLaunch:
        sizes = (rows, length, count, *numbers, launches)
        dtypes = x.dtype, INDEX
        return CudaLaunch("index/sort.cu", name, sizes, dtypes, definitions=macros, layouts=(scratch,), **work)

    first = launch("sort_tiles", blocks=min(rows * tiles, MAX_GRID[0]), threads=tile)
    merges = [launch("merge_runs", tile << i - 1, i, elements=rows * length) for i in range(1, launches)]
    return [CudaKernel((first, *merges), scratch)]


register("argsort", "cuda", argsort)


def random_uniform(target: Target, rng: Any, shape: tuple[int, ...], stream: int, dtype: np.dtype) -> list[CudaKernel]:
    states, count = math.prod(rng.shape[:-1]), math.prod(shape)
    numbers, threads = (states, count, stream), states * -(-count // 4)
    return [CudaKernel((CudaLaunch("index/random.cu", "random_uniform", numbers, (dtype,), threads),))]


register("random_uniform", "cuda", random_uniform)
