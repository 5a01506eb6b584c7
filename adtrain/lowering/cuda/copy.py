"""Transpose, flip, concatenate, slice and pad: strided copies by `index/copy.cu`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from adtrain.core.kernel import WARP, CudaKernel, CudaLaunch, Target, register
from adtrain.lowering import layouts
from adtrain.lowering.layouts import Ints, Layout
from adtrain.lowering.shapes import output_type

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
"""Bytes that a block of `index/join.cu` copies."""
MAX_JOINED = 128
"""Arguments of one launch of `index/join.cu`; 4 KiB of kernel arguments hold three numbers for each."""


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
        (kernel,) = copies(layouts.concatenate(i, *xs, axis=axis), x.dtype, (i, len(xs)))
        found += kernel.launches
    return [CudaKernel(tuple(found))]


def _join(xs: Sequence[Any]) -> CudaLaunch:
    """The launch of `index/join.cu`, in which a block copies a chunk of one argument."""
    sizes, dtype = [math.prod(x.shape) for x in xs], xs[0].dtype
    starts = list(accumulate(sizes, initial=0))
    first = list(accumulate((-(-size * dtype.itemsize // CHUNK) for size in sizes), initial=0))
    macros = {"PARTS": len(xs), "CHUNK": CHUNK}
    return CudaLaunch(
        "index/join.cu", "join", (*starts, *first), (dtype,), blocks=first[-1], threads=THREADS, definitions=macros
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


register("transpose", "cuda", lambda target, x, axes: copies(layouts.transpose(x, axes), x.dtype))
register("flip", "cuda", lambda target, x, axes: copies(layouts.flip(x, axes), x.dtype))
register("slice", "cuda", lambda target, x, **bounds: copies(layouts.slice(x, **bounds), x.dtype))
register("concatenate", "cuda", concatenate)
register("pad", "cuda", pad)
