"""Offsets in one block of memory (the arena) for values with lifetimes.

Greedy by size: the largest value first, each at the lowest offset that is free during its lifetime (Y. Pisarchyk,
J. Lee: "Efficient Memory Management for Deep Neural Net Inference", 2020).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from adtrain.core.program import Variable

ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vector register."""


class Request(NamedTuple):
    """`size` bytes from time `start` to time `end`, both included, for a variable or an equation's workspace."""

    key: Variable | int
    size: int
    start: int
    end: int


class Arena:
    """Requests for memory, each over an interval of time."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def add(self, key: Variable | int, size: int, start: int, end: int) -> None:
        self.requests.append(Request(key, aligned_to_cache_line(size), start, end))

    def offsets(self) -> dict[Variable | int, int]:
        """The offset of each request."""
        offsets: dict[Variable | int, int] = dict.fromkeys((r.key for r in self.requests), 0)
        placed = np.empty((4, len(self.requests)), np.int64)  # those with an offset, as `_lowest_offset` takes them
        largest_first = sorted((r for r in self.requests if r.size), key=lambda r: -r.size)
        for count, request in enumerate(largest_first):
            offset = offsets[request.key] = _lowest_offset(request, placed[:, :count])
            i = np.searchsorted(placed[0, :count], offset, "right")
            placed[:, i + 1 : count + 1] = placed[:, i:count]
            placed[:, i] = offset, offset + request.size, request.start, request.end
        return offsets

    def size(self, offsets: dict[Variable | int, int]) -> int:
        """Bytes of the arena."""
        return max((offsets[r.key] + r.size for r in self.requests), default=0)


def aligned_to_cache_line(size: int) -> int:
    """`size` in bytes, rounded up to whole cache lines."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _lowest_offset(request: Request, placed: np.ndarray) -> int:
    """The lowest offset at which no placed request shares both time and memory with ``request``.

    Args:
        placed: for each placed request the start and end of its memory and of its time, (4, N), sorted by the first.
    """
    alive = placed[:2, (placed[2] <= request.end) & (placed[3] >= request.start)]
    taken = np.maximum.accumulate(np.concatenate(((0,), alive[1])))  # all memory before each gap
    gaps = np.flatnonzero(alive[0] - taken[:-1] >= request.size)
    return int(taken[gaps[0] if gaps.size else -1])
