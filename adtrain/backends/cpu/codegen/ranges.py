"""Ranges of memory, and whether one overlaps with any of many."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple


class Range(NamedTuple):
    """Memory from `start` to before `end`: its kind, and the bytes in the arena or the number of an argument."""

    start: tuple[str, int]
    end: tuple[str, int]


class Ranges:
    """Memory as disjoint ranges in order."""

    def __init__(self) -> None:
        self.starts: list[tuple[str, int]] = []
        self.ends: list[tuple[str, int]] = []

    def overlap(self, added: Range) -> bool:
        before_end = bisect_left(self.starts, added.end)
        return before_end > 0 and self.ends[before_end - 1] > added.start

    def add(self, added: Range) -> None:
        first, last = bisect_right(self.ends, added.start), bisect_left(self.starts, added.end)
        start, end = added
        if first < last:  # these overlap with it
            start, end = min(start, self.starts[first]), max(end, self.ends[last - 1])
        self.starts[first:last], self.ends[first:last] = [start], [end]
