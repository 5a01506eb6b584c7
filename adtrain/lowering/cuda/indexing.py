"""Gathers, scatters, one_hot, argsort, random numbers and the hash encoding of points: `index/index.cu`, `scatter.cu`,
`sort.cu`, `random.cu` and `hash_grid.cu`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from adtrain.core.kernel import MAX_GRID, WARP, Arrays, CudaKernel, CudaLaunch, Target, lengths, memory_layout, register
from adtrain.lowering import layouts
from adtrain.lowering.cuda.reduce import of_one_member, power_of_two, vector_width


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


MIN_SORTED, SORT_FIRST = 256, 1 << 27
"""Minimum of positions for which sorting is a candidate; minimum of comparisons for which it is the first one."""
SCATTER_TILE, SEGMENT = 512, 32
"""Positions that a block of `index/scatter.cu` sorts; maximum of positions of a segment."""


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
    sortable = count < 1 << 32 and 0 < length < 1 << 32
    if merged and not sortable:
        return []  # the kernel of a member must not depend on the number of members
    if not sortable or (count < MIN_SORTED and not merged):
        return [compare]
    by_segments = _by_segments(numbers, ct, indices, segment)
    return [by_segments, compare] if merged or math.prod(one) >= SORT_FIRST else [compare, by_segments]


def _by_segments(numbers: layouts.Lengths, ct: Any, indices: Any, segment: int) -> CudaKernel:
    """The kernel that sorts positions by index, adds each `segment` neighbouring ones, then the parts of each index."""
    outer, length, inner, count = numbers
    width, tiles, segments = vector_width(inner, ct.dtype.itemsize), -(-count // SCATTER_TILE), -(-count // segment)
    sums, sorts = outer * segments * (inner // width), 1 + max(tiles - 1, 0).bit_length()
    (size,) = lengths(count=count)
    arrays: Arrays = {"LISTS": (8, size * 2), "SEGMENTS": (int(ct.dtype.itemsize), outer * segments * 2 * inner)}
    scratch = memory_layout("SCRATCH", arrays, size)

    def step(name: str, *others: int, **work: Any) -> CudaLaunch:
        macros = {"TILE": SCATTER_TILE, "SEGMENT": segment, "WIDTH": width}
        given, dtypes = (*numbers, sorts, *others), (ct.dtype, indices.dtype)
        work |= {"definitions": macros, "layouts": (scratch,), "checked": True}
        return CudaLaunch("index/scatter.cu", name, given, dtypes, **work)

    clear = step("clear", elements=outer * length * inner // width)
    first = step("sort_tiles", blocks=tiles, threads=SCATTER_TILE)
    merges = (step("merge_runs", i, SCATTER_TILE << i - 1, elements=count) for i in range(1, sorts))
    add = (step(name, elements=sums) for name in ("sum_segments", "join_segments"))
    return CudaKernel((clear, first, *merges, *add), scratch)


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


def _grid_macros(points: Any, levels: Any, features: int, itemsize: int) -> dict[str, int]:
    return {
        "COORDINATES": points.shape[1],
        "LEVELS": levels.shape[0],
        "FEATURES": features,
        "WIDTH": vector_width(features, itemsize),
    }


def hash_grid(target: Target, points: Any, table: Any, levels: Any, along: layouts.Ints) -> list[CudaKernel]:
    macros = _grid_macros(points, levels, table.shape[1], table.dtype.itemsize)
    elements = 2 * points.shape[0] * levels.shape[0] * table.shape[1] // macros["WIDTH"]
    numbers = points.shape[0], layouts.axis_bits(along)
    launch = CudaLaunch("index/hash_grid.cu", "hash_grid", numbers, (table.dtype,), elements, definitions=macros)
    return [CudaKernel((launch,))]


SHARED_BYTES, MOST_THREADS = 216 << 10, 1024
"""Shared memory and threads of a block that adds in shared memory."""
MIN_POINTS = 1 << 14
"""Minimum points. A block of fewer points has fewer summands than sums, each of which it adds to global memory."""


def hash_grid_add(
    target: Target, ct: Any, points: Any, levels: Any, rows: int, along: layouts.Ints
) -> list[CudaKernel]:
    """Sums of integers, for many points those of small levels in shared memory.

    `room` bits hold how much larger a sum can be than a summand.
    """
    shared_sums = min(SHARED_BYTES, target.shared) // 8 if points.shape[0] >= MIN_POINTS else 0
    macros = _grid_macros(points, levels, ct.shape[2], ct.dtype.itemsize)
    macros |= {"SHARED_SUMS": shared_sums, "THREADS": MOST_THREADS}
    elements, room = rows * ct.shape[2], points.shape[0].bit_length() + len(along)
    (count,) = lengths(elements=elements)
    scratch = memory_layout("SCRATCH", {"SUMS": (8, count), "LARGEST": (8, 1)}, count)
    numbers, vectors = (points.shape[0], layouts.axis_bits(along), elements, room), ct.size // macros["WIDTH"]

    def launch(name: str, elements: int | None = None, **size: Any) -> CudaLaunch:
        return CudaLaunch(
            "index/hash_grid.cu",
            f"hash_grid_add_{name}",
            numbers,
            (ct.dtype,),
            elements,
            definitions=macros,
            layouts=(scratch,),
            **size,
        )

    groups = levels.shape[0] * ct.shape[2]
    parts = max(1, 2 * target.multiprocessors // groups)  # sums of about half of the levels fit
    in_shared = launch("shared", blocks=(parts, groups), threads=MOST_THREADS, shared=8 * shared_sums)
    launches = (
        launch("clear", elements + 1),
        launch("largest", vectors),
        *([in_shared] if shared_sums else []),
        launch("points", 2 * ct.size),
        launch("finish", elements),
    )
    return [CudaKernel(launches, scratch)]


register("hash_grid", "cuda", hash_grid)
register("hash_grid_add", "cuda", hash_grid_add)
