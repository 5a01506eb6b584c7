"""Rows held in registers: by the lanes of a warp, or by the threads of a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from adtrain.core.kernel import LegacyKernel
from adtrain.lowering.cuda.reduce import WARP, power_of_two, vector

HELD_ROW = 64 << 10
"""Bytes of a row that a block's registers hold, and its shared memory on every device."""
WARP_ROW, EACH = 4096, 64
"""Bytes of a row up to which it is for a warp's lanes, and that are enough for a thread."""
NARROW, MOST_TEAM = 8, 512
"""The fewest lanes that share a row of many vectors, which they read side by side; the most threads that do."""


def _held(length: int, itemsize: int) -> dict[str, int]:
    """TEAM threads that keep a row in their registers, ITEMS vectors of WIDTH each; ITEMS is 0 where it is too long."""
    width, size = vector(length, itemsize), length * itemsize
    vectors, enough = length // width, power_of_two(-(-size // EACH))
    team = min(power_of_two(vectors), max(NARROW, min(enough, WARP))) if size <= WARP_ROW else min(enough, MOST_TEAM)
    return {"TEAM": team, "ITEMS": -(-vectors // team) if size <= HELD_ROW else 0, "WIDTH": width}


def teams(kernel: LegacyKernel, rows: Callable[..., tuple[int, int]]) -> tuple[LegacyKernel, LegacyKernel]:
    """A kernel of rows held in registers, by lanes of warps and by blocks; ``rows``: how many, and their length, or
    length 0 where there are no rows."""

    def held(x: Any, *args: Any, **params: Any) -> dict[str, int]:
        return _held(rows(x, **params)[1], x.dtype.itemsize)

    def fits(x: Any, **params: Any) -> bool:
        return rows(x, **params)[1] > 0 and held(x, **params)["ITEMS"] > 0

    tuned = replace(kernel, definitions=lambda x, **params: {**kernel.definitions(x, **params), **held(x, **params)})
    return (
        replace(
            tuned,
            elements=lambda x, **params: rows(x, **params)[0] * held(x, **params)["TEAM"],
            applies=lambda x, **params: fits(x, **params) and held(x, **params)["TEAM"] <= WARP,
        ),
        replace(
            tuned,
            blocks=lambda x, **params: rows(x, **params)[0],
            threads=lambda x, **params: held(x, **params)["TEAM"],
            applies=fits,
        ),
    )
