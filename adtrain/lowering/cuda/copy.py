"""The CUDA kernels that copy between layouts: `kernels/cuda/index/copy.cu`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from adtrain.core.kernel import LegacyKernel, legacy
from adtrain.core.registry import register
from adtrain.lowering import layouts
from adtrain.lowering.layouts import Layout
from adtrain.lowering.shapes import output_type

TILED = 8
"""The shortest axes whose exchange is worth going through tiles."""
TILE, BYTE_TILE = 64, 128
"""Elements of a tile's row, and those of single bytes."""
AXES = 6
"""Axes that kernels/cuda/index/copy.cu goes through."""
THREADS = 256
"""Threads of a block that copies a tile; index/copy.cu is written for as many."""
VECTOR = 16
"""Bytes that a thread moves at once."""


def copies(layout: Callable[..., Layout], each: bool = False) -> tuple[LegacyKernel, ...]:
    """The candidates of a copy; ``layout`` is a function of the primitive's arguments."""

    def axes(*args: Any, **params: Any) -> list[tuple[int, int, int]]:
        lengths, source, target, _, _ = layout(*args, **params)
        return _merged(lengths, source, target)

    def tiled(*args: Any, **params: Any) -> list[tuple[int, int, int]] | None:
        """The axes with the source's last one before the target's, if exchanging them through tiles is worth it."""
        found = axes(*args, **params)
        rows = [a for a in found[:-1] if abs(a[1]) == 1]
        if not rows or abs(found[-1][1]) == 1 or min(rows[0][0], found[-1][0]) < TILED:
            return None
        return [a for a in found[:-1] if a is not rows[0]] + [rows[0], found[-1]]

    def numbers(found: list[tuple[int, int, int]], *args: Any, **params: Any) -> tuple[int, ...]:
        padded = [(1, 0, 0)] * (AXES - len(found)) + found
        return *(a[k] for k in range(3) for a in padded), *layout(*args, **params)[3:]

    def types(*args: Any, **params: Any) -> Any:
        return (args[1 + args[0] if each else 0].dtype,)

    def tile(*args: Any, **params: Any) -> int:
        return TILE if types(*args, **params)[0].itemsize > 1 else BYTE_TILE

    def tiles(*args: Any, **params: Any) -> int:
        *others, rows, columns = tiled(*args, **params) or axes(*args, **params)
        side = tile(*args, **params)
        return math.prod(a[0] for a in others) * -(-rows[0] // side) * -(-columns[0] // side)

    def macros(*args: Any, **params: Any) -> dict[str, int]:
        found, (*_, source, target) = axes(*args, **params), layout(*args, **params)
        if not found or abs(found[-1][1]) != 1 or found[-1][2] != 1:
            return {"AXES": max(len(found), 1)}
        backwards = int(found[-1][1] < 0)
        starts = (source + backwards, target, *(n for a in found[:-1] for n in a[1:]))
        width = math.gcd(VECTOR // types(*args, **params)[0].itemsize, found[-1][0], *starts)
        return {"AXES": len(found), "WIDTH": width, "REVERSED": backwards}

    return (
        LegacyKernel(
            "index/copy.cu",
            "copy_tiles",
            lambda *args, **params: numbers(tiled(*args, **params) or [], *args, **params),
            types,
            blocks=tiles,
            threads=lambda *args, **params: THREADS,
            definitions=lambda *args, **params: {"TILE": tile(*args, **params)},
            applies=lambda *args, **params: tiled(*args, **params) is not None and len(axes(*args, **params)) <= AXES,
            each=each,
        ),
        LegacyKernel(
            "index/copy.cu",
            "copy",
            lambda *args, **params: numbers(axes(*args, **params), *args, **params),
            types,
            elements=lambda *args, **params: (
                math.prod(layout(*args, **params)[0]) // macros(*args, **params).get("WIDTH", 1)
            ),
            definitions=macros,
            applies=lambda *args, **params: len(axes(*args, **params)) <= AXES,
            each=each,
        ),
    )


def _merged(lengths: Sequence[int], source: Sequence[int], target: Sequence[int]) -> list[tuple[int, int, int]]:
    """(length, distance in the source, in the target) of the fewest axes."""
    found: list[tuple[int, int, int]] = []
    for length, s, t in zip(lengths, source, target, strict=True):
        if length == 1:
            continue
        if found and found[-1][1:] == (s * length, t * length):
            length *= found.pop()[0]
        found.append((length, s, t))
    return found


def padding(shape: Callable[..., Any]) -> LegacyKernel:
    """The kernel of a pad; ``shape`` is its rule for the type of the result."""

    def axes(x: Any, **params: Any) -> list[tuple[int, int, int, int]]:
        return _frames(shape(x, **params).shape, x.shape, params["low"], params["gaps"])

    def numbers(x: Any, **params: Any) -> tuple[int | float, ...]:
        found = axes(x, **params)
        found = [(1, 1, 0, 1)] * (AXES - len(found)) + found
        return *(a[k] for k in range(4) for a in found), float(params["value"])

    def macros(x: Any, **params: Any) -> dict[str, int]:
        found = axes(x, **params)
        width = 1
        if found and found[-1][3] == 1:
            width = math.gcd(VECTOR // x.dtype.itemsize, *found[-1][:3])
        return {"AXES": max(len(found), 1), "WIDTH": width}

    return LegacyKernel(
        "index/copy.cu",
        "pad",
        numbers,
        elements=lambda x, **params: shape(x, **params).size // macros(x, **params)["WIDTH"],
        definitions=macros,
        applies=lambda x, **params: len(axes(x, **params)) <= AXES,
    )


def _frames(
    padded: Sequence[int], lengths: Sequence[int], low: Sequence[int], gaps: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """(padded length, length, where it starts, step) of the fewest axes."""
    found: list[tuple[int, int, int, int]] = []
    for m, n, start, gap in zip(padded, lengths, low, gaps, strict=True):
        if m == n == 1:
            continue
        if found and m == n and found[-1][3] == 1:
            outer = found.pop()
            found.append((outer[0] * m, outer[1] * n, outer[2] * m, 1))
        else:
            found.append((m, n, start, gap + 1 if n > 1 else 1))
    return found


for name, layout in (("transpose", layouts.transpose), ("flip", layouts.flip), ("slice", layouts.slice)):
    register(name, "cuda", legacy(copies(layout)))
register("concatenate", "cuda", legacy(copies(layouts.concatenate, each=True)))
register("pad", "cuda", legacy(padding(lambda x, **params: output_type("pad", x, **params))))
