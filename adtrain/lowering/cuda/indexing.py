"""Kernels that move elements, in the folder `index` of `kernels/cuda`: copies (`copy.cu`), gathers, scatters and
one_hot (`index.cu`, `scatter.cu`), argsort (`sort.cu`), random numbers (`random.cu`) and the hash encoding of points
(`hash_grid.cu`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from adtrain.core.kernel import MAX_GRID, WARP, Arrays, CudaKernel, CudaLaunch, Target, lengths, memory_layout, register
from adtrain.lowering import shapes
from adtrain.lowering.cuda.reduce import of_one_member, power_of_two, vector_width
from adtrain.lowering.shapes import Ints, Layout, Lengths, output_type

MIN_TILED = 8
"""Minimum length of two axes for exchanging them through tiles in shared memory."""
TILE, BYTE_TILE = 64, 128
"""Rows and columns of a square tile, and of one of single bytes."""
SHORT = 32
"""The most elements of an axis that is one side of a tile, whose other side is longer than that of a square."""
MAX_AXES = 6
"""Axes that kernels/cuda/index/copy.cu iterates over."""
THREADS = 256
"""Threads per block of copy_tiles."""
VECTOR = 16
"""Bytes that a thread moves at once."""
CHUNK = 16 << 10
"""Bytes that a block of `join` copies."""
MAX_JOINED = 128
"""Arguments of one launch of `join`; 4 KiB of kernel arguments hold three numbers for each."""


class Axis(NamedTuple):
    """An axis of a copy. Strides are in elements."""

    length: int
    source: int
    target: int


class PadAxis(NamedTuple):
    """An axis of a pad: index i of the source is at ``low + i * step`` of the target."""

    padded: int
    length: int
    low: int
    step: int


class Tiles(NamedTuple):
    """A transpose through tiles in shared memory (`index/copy_tile.cuh`), by a part of a launch.

    Attributes:
        rows, columns: of a tile; rows are contiguous in the source, columns in the target.
        blocks: the number of tiles.
        axes: at most one other axis, then that of the rows and that of the columns.
    """

    rows: int
    columns: int
    blocks: int
    axes: tuple[Axis, Axis, Axis]


def transposed_tiles(x: Any, axes: Ints) -> Tiles | None:
    """The tiles of a transpose; None if it is no copy through tiles, or has more axes."""
    tiled = _tiled(_merged(shapes.transpose(x, axes)))
    if tiled is None or len(tiled) > 3:
        return None
    outer, rows, columns = [Axis(1, 0, 0)] * (3 - len(tiled)) + tiled
    across, down = _sides(rows.length, columns.length, TILE if x.dtype.itemsize > 1 else BYTE_TILE)
    blocks = outer.length * -(-rows.length // across) * -(-columns.length // down)
    return Tiles(across, down, blocks, (outer, rows, columns))


def copies(layout: Layout, dtype: np.dtype, operands: tuple[int, ...] | None = None) -> list[CudaKernel]:
    """The candidates for a copy: through tiles where rows of the source become columns, or element by element."""
    axes = _merged(layout)
    if len(axes) > MAX_AXES:
        return []

    def kernel(name: str, axes: list[Axis], definitions: dict[str, int], **work: Any) -> CudaKernel:
        padded = [Axis(1, 0, 0)] * (MAX_AXES - len(axes)) + axes
        numbers = (*(axis[k] for k in range(3) for axis in padded), layout.source_offset, layout.target_offset)
        file = "index/copy.cu"
        return CudaKernel(
            (CudaLaunch(file, name, numbers, (dtype,), definitions=definitions, operands=operands, **work),)
        )

    found = []
    if tiled := _tiled(axes):
        *others, rows, columns = tiled
        across, down = _sides(rows.length, columns.length, TILE if dtype.itemsize > 1 else BYTE_TILE)
        blocks = math.prod(axis.length for axis in others) * -(-rows.length // across) * -(-columns.length // down)
        found.append(kernel("copy_tiles", tiled, {"ROWS": across, "COLUMNS": down}, blocks=blocks, threads=THREADS))
    macros = {"AXES": max(len(axes), 1)}
    if axes and abs(axes[-1].source) == 1 and axes[-1].target == 1:
        reverse = int(axes[-1].source < 0)
        starts = (layout.source_offset + reverse, layout.target_offset, *(n for axis in axes[:-1] for n in axis[1:]))
        macros |= {"WIDTH": math.gcd(VECTOR // dtype.itemsize, axes[-1].length, *starts), "REVERSED": reverse}
    elements = math.prod(layout.lengths) // macros.get("WIDTH", 1)
    return [*found, kernel("copy", axes, macros, elements=elements)]


def _tiled(axes: list[Axis]) -> list[Axis] | None:
    """The axes with the source's contiguous axis before the target's, if both have MIN_TILED elements; else None."""
    rows = [axis for axis in axes[:-1] if abs(axis.source) == 1]
    if not rows or abs(axes[-1].source) == 1 or min(rows[0].length, axes[-1].length) < MIN_TILED:
        return None
    return [axis for axis in axes[:-1] if axis is not rows[0]] + [rows[0], axes[-1]]


def _sides(rows: int, columns: int, side: int) -> tuple[int, int]:
    """The rows and columns of a tile for axes of these lengths: `side` each, or a narrow tile of similar area."""
    short = min(rows, columns)
    if short > SHORT or max(rows, columns) <= side:
        return side, side
    tiles = -(-max(rows, columns) * short // (side * side))
    long = -(-max(rows, columns) // (tiles * WARP)) * WARP
    return (short, long) if rows == short else (long, short)


def _merged(layout: Layout) -> list[Axis]:
    """The fewest axes of a copy."""
    found: list[Axis] = []
    for length, source, target in zip(layout.lengths, layout.source_strides, layout.target_strides, strict=True):
        if length == 1:
            continue
        if found and found[-1][1:] == (source * length, target * length):
            length *= found.pop().length
        found.append(Axis(length, source, target))
    return found


def concatenate(target: Target, *xs: Any, axis: int) -> list[CudaKernel]:
    """One launch where the parts of the result are contiguous, else one copy per argument.

    Source and target have their axes in the same order, so there is nothing to tile.
    """
    contiguous = math.prod(xs[0].shape[:axis]) == 1 and all(math.prod(x.shape) for x in xs)
    if contiguous and 1 < len(xs) <= MAX_JOINED:
        return [CudaKernel((_join(xs),))]
    found: list[CudaLaunch] = []
    for i, x in enumerate(xs):
        (kernel,) = copies(shapes.concatenate(i, *xs, axis=axis), x.dtype, (i, len(xs)))
        found += kernel.launches
    return [CudaKernel(tuple(found))]


def _join(xs: Sequence[Any]) -> CudaLaunch:
    """The launch of `join`, in which a block copies a chunk of one argument."""
    sizes, dtype = [math.prod(x.shape) for x in xs], xs[0].dtype
    starts = list(accumulate(sizes, initial=0))
    first = list(accumulate((-(-size * dtype.itemsize // CHUNK) for size in sizes), initial=0))
    macros = {"PARTS": len(xs), "CHUNK": CHUNK}
    return CudaLaunch(
        "index/copy.cu", "join", (*starts, *first), (dtype,), blocks=first[-1], threads=THREADS, definitions=macros
    )


def pad(target: Target, x: Any, low: Ints, high: Ints, gaps: Ints, value: float) -> list[CudaKernel]:
    out = output_type("pad", x, low=low, high=high, gaps=gaps, value=value)
    axes = _pad_axes(out.shape, x.shape, low, gaps)
    if len(axes) > MAX_AXES:
        return []
    padded = [PadAxis(1, 1, 0, 1)] * (MAX_AXES - len(axes)) + axes
    width = math.gcd(VECTOR // x.dtype.itemsize, *axes[-1][:3]) if axes and axes[-1].step == 1 else 1
    number = int(value) if x.dtype.kind in "biu" else float(value)
    numbers = (*(axis[k] for k in range(4) for axis in padded), number)
    macros = {"AXES": max(len(axes), 1), "WIDTH": width}
    return [
        CudaKernel((CudaLaunch("index/copy.cu", "pad", numbers, (x.dtype,), out.size // width, definitions=macros),))
    ]


def _pad_axes(padded: Sequence[int], lengths: Sequence[int], low: Ints, gaps: Ints) -> list[PadAxis]:
    """The fewest axes of a pad."""
    found: list[PadAxis] = []
    for m, n, start, gap in zip(padded, lengths, low, gaps, strict=True):
        if m == n == 1:
            continue
        if found and m == n and found[-1].step == 1:
            outer = found.pop()
            found.append(PadAxis(outer.padded * m, outer.length * n, outer.low * m, 1))
        else:
            found.append(PadAxis(m, n, start, gap + 1 if n > 1 else 1))
    return found


register("transpose", "cuda", lambda target, x, axes: copies(shapes.transpose(x, axes), x.dtype))
register("flip", "cuda", lambda target, x, axes: copies(shapes.flip(x, axes), x.dtype))
register("slice", "cuda", lambda target, x, **bounds: copies(shapes.slice(x, **bounds), x.dtype))
register("concatenate", "cuda", concatenate)
register("pad", "cuda", pad)


def launch(name: str, numbers: Lengths, x: Any, indices: Any, elements: int, width: int = 1) -> CudaLaunch:
    """A kernel of an array and indices, with ``elements`` vectors of ``width`` to compute."""
    dtypes, macros = (x.dtype, indices.dtype), {"WIDTH": width}
    return CudaLaunch("index/index.cu", name, numbers, dtypes, elements, definitions=macros, checked=True)


def take(target: Target, x: Any, indices: Any, axis: int) -> list[CudaKernel]:
    numbers = outer, _, inner, count = shapes.take(x, indices, axis)
    width = vector_width(inner, x.dtype.itemsize)
    return [CudaKernel((launch("take", numbers, x, indices, outer * inner * count // width, width),))]


def take_along_axis(target: Target, x: Any, indices: Any, axis: int) -> list[CudaKernel]:
    numbers = outer, _, inner, count = shapes.take_along_axis(x, indices, axis)
    return [CudaKernel((launch("take_along_axis", numbers, x, indices, outer * inner * count),))]


def scatter_along_axis(target: Target, ct: Any, indices: Any, axis: int, length: int) -> list[CudaKernel]:
    """The candidates: one pass, where there is one index per row; or zeros, then a thread per row that adds."""
    numbers = outer, _, inner, count = shapes.scatter_along_axis(ct, indices, axis, length)
    width = vector_width(inner if inner > 1 else length, ct.dtype.itemsize)
    clear = launch("clear_along_axis", numbers, ct, indices, outer * length * inner // width, width)
    add = launch("scatter_along_axis", numbers, ct, indices, outer * inner)
    one_pass = CudaKernel((replace(clear, name="scatter_one"),))
    return [*([one_pass] if count == 1 else []), CudaKernel((clear, add))]


COPIED_BY_THREAD = 64
"""Vectors that a thread of `put_rows` copies where the result has memory of its own."""


def put_rows(target: Target, x: Any, rows: Any, positions: Any, axis: int) -> list[CudaKernel]:
    numbers = outer, before, length, inner = shapes.put_rows(x, rows, positions, axis)
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
    numbers = outer, length, inner, count = shapes.scatter_add(ct, indices, axis, length)
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


def _by_segments(numbers: Lengths, ct: Any, indices: Any, segment: int) -> CudaKernel:
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


def hash_grid(target: Target, points: Any, table: Any, levels: Any, along: Ints) -> list[CudaKernel]:
    macros = _grid_macros(points, levels, table.shape[1], table.dtype.itemsize)
    elements = 2 * points.shape[0] * levels.shape[0] * table.shape[1] // macros["WIDTH"]
    numbers = points.shape[0], shapes.axis_bits(along)
    launch = CudaLaunch("index/hash_grid.cu", "hash_grid", numbers, (table.dtype,), elements, definitions=macros)
    return [CudaKernel((launch,))]


SHARED_BYTES, MOST_THREADS = 216 << 10, 1024
"""Shared memory and threads of a block that adds in shared memory."""
MIN_POINTS = 1 << 14
"""Minimum points. A block of fewer points has fewer summands than sums, each of which it adds to global memory."""


def hash_grid_add(target: Target, ct: Any, points: Any, levels: Any, rows: int, along: Ints) -> list[CudaKernel]:
    """Sums of integers, for many points those of small levels in shared memory.

    `room` bits hold how much larger a sum can be than a summand.
    """
    shared_sums = min(SHARED_BYTES, target.shared) // 8 if points.shape[0] >= MIN_POINTS else 0
    macros = _grid_macros(points, levels, ct.shape[2], ct.dtype.itemsize)
    macros |= {"SHARED_SUMS": shared_sums, "THREADS": MOST_THREADS}
    elements, room = rows * ct.shape[2], points.shape[0].bit_length() + len(along)
    (count,) = lengths(elements=elements)
    scratch = memory_layout("SCRATCH", {"SUMS": (8, count), "LARGEST": (8, 1)}, count)
    numbers, vectors = (points.shape[0], shapes.axis_bits(along), elements, room), ct.size // macros["WIDTH"]

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
