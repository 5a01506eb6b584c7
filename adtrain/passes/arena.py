"""Offsets in one block of memory (the arena) for values with lifetimes.

Greedy by size: the largest value first, each at the lowest offset that is free during its lifetime (Y. Pisarchyk,
J. Lee: "Efficient Memory Management for Deep Neural Net Inference", 2020).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
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


class Placed(NamedTuple):
    """A request and its offset."""

    offset: int
    request: Request


class Arena:
    """Requests for memory, each over an interval of time."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def add(self, key: Variable | int, size: int, start: int, end: int) -> None:
        self.requests.append(Request(key, aligned(size), start, end))

    def offsets(self) -> dict[Variable | int, int]:
        """The offset of each request."""
        offsets: dict[Variable | int, int] = {}
        blocks: list[_Block] = []
        for request in sorted(self.requests, key=lambda r: -r.size):
            offsets[request.key] = 0
            if request.size:
                offsets[request.key] = _lowest_offset(request, blocks)
                _insert(Placed(offsets[request.key], request), blocks)
        return offsets

    def size(self, offsets: dict[Variable | int, int]) -> int:
        """Bytes of the arena."""
        return max((offsets[r.key] + r.size for r in self.requests), default=0)


def aligned(size: int) -> int:
    """`size` rounded up to a multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


BLOCK = 64
"""Maximum requests of a `_Block`."""


class _Block:
    """Neighbouring requests in the order of their offsets, and what lets a search skip all of them at once.

    Attributes:
        first, reach: the lowest offset, and the highest end of a request's memory.
        starts, ends: earliest and latest time at which a request begins, and at which one ends.
        gap: the largest gap between the requests' memory.
    """

    def __init__(self, placed: list[Placed]) -> None:
        self.placed = placed
        self.first, self.gap = placed[0].offset, 0
        self.reach = self.first
        for offset, request in placed:
            self.gap = max(self.gap, offset - self.reach)
            self.reach = max(self.reach, offset + request.size)
        self.starts = min(r.start for _, r in placed), max(r.start for _, r in placed)
        self.ends = min(r.end for _, r in placed), max(r.end for _, r in placed)


def _lowest_offset(request: Request, blocks: Sequence[_Block]) -> int:
    """The lowest offset at which no placed request overlaps with ``request`` in time and memory."""
    _, size, start, end = request
    offset = 0
    for block in blocks:  # sorted by offset
        if block.ends[1] < start or end < block.starts[0]:
            continue  # none overlaps in time
        if block.ends[0] >= start and end >= block.starts[1] and block.gap < size:  # all overlap in time
            if block.first - offset >= size:
                return offset
            offset = max(offset, block.reach)
            continue
        for at, other in block.placed:
            if other.end < start or end < other.start:
                continue
            if at - offset >= size:
                return offset
            offset = max(offset, at + other.size)
    return offset


def _insert(placed: Placed, blocks: list[_Block]) -> None:
    """Insert it into the block at its offset. A block with more than BLOCK requests becomes two."""
    if not blocks:
        blocks.append(_Block([placed]))
        return
    i = max(bisect_right(blocks, placed.offset, key=lambda block: block.first) - 1, 0)
    members = blocks[i].placed
    insort(members, placed, key=lambda p: p.offset)
    half = len(members) // 2 if len(members) > BLOCK else len(members)
    blocks[i : i + 1] = [_Block(part) for part in (members[:half], members[half:]) if part]
