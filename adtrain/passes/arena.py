"""Offsets in one block of memory (the arena) for values with lifetimes.

Greedy by size: the largest value first, each at the lowest offset that is free during its lifetime (Y. Pisarchyk,
J. Lee: "Efficient Memory Management for Deep Neural Net Inference", 2020).
"""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

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
        self.requests.append(Request(key, aligned(size), start, end))

    def offsets(self) -> dict[Variable | int, int]:
        """The offset of each request."""
        placed: list[tuple[int, Request]] = []
        offsets: dict[Variable | int, int] = {}
        for request in sorted(self.requests, key=lambda r: -r.size):
            if request.size == 0:
                offsets[request.key] = 0
                continue
            offset = 0
            for start, other in placed:  # sorted by offset
                if other.end < request.start or request.end < other.start:
                    continue
                if start - offset >= request.size:
                    break
                offset = max(offset, start + other.size)
            offsets[request.key] = offset
            insort(placed, (offset, request), key=lambda pair: pair[0])
        return offsets

    def size(self, offsets: dict[Variable | int, int]) -> int:
        """Bytes of the arena."""
        return max((offsets[r.key] + r.size for r in self.requests), default=0)


def aligned(size: int) -> int:
    """`size` rounded up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT
