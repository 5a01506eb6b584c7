"""The CUDA kernels that copy between layouts: `kernels/cuda/copy.cu`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from adtrain.core.kernel import CudaKernel

TILED = 8
"""The shortest axes whose exchange is worth going through tiles."""
TILE = 64
"""Rows and columns of a tile in kernels/cuda/copy.cu."""
AXES = 6
"""Axes that kernels/cuda/copy.cu goes through."""
THREADS = 256
"""Threads of a block that copies a tile; copy.cu is written for as many."""

Layout = tuple[Sequence[int], Sequence[int], Sequence[int], int, int]
"""Lengths in the target's order, distances in source and target, and where both start."""


def copies(layout: Callable[..., Layout], each: bool = False) -> tuple[CudaKernel, ...]:
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

    def tiles(*args: Any, **params: Any) -> int:
        *others, rows, columns = tiled(*args, **params) or axes(*args, **params)
        return math.prod(a[0] for a in others) * -(-rows[0] // TILE) * -(-columns[0] // TILE)

    return (
        CudaKernel(
            "copy.cu",
            "copy_tiles",
            lambda *args, **params: numbers(tiled(*args, **params) or [], *args, **params),
            types,
            blocks=tiles,
            threads=lambda *args, **params: THREADS,
            applies=lambda *args, **params: tiled(*args, **params) is not None and len(axes(*args, **params)) <= AXES,
            each=each,
        ),
        CudaKernel(
            "copy.cu",
            "copy",
            lambda *args, **params: numbers(axes(*args, **params), *args, **params),
            types,
            elements=lambda *args, **params: math.prod(layout(*args, **params)[0]),
            definitions=lambda *args, **params: {"AXES": max(len(axes(*args, **params)), 1)},
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


def padding(layout: Callable[..., Layout], shape: Callable[..., Any]) -> tuple[CudaKernel, ...]:
    """The value everywhere, then a copy."""
    fill = CudaKernel(
        "copy.cu",
        "fill",
        lambda x, **params: (shape(x, **params).size, float(params["value"])),
        elements=lambda x, **params: shape(x, **params).size,
    )
    return tuple(replace(fill, then=copy, applies=copy.applies) for copy in copies(layout))
