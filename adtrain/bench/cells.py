"""How values of results are written: numbers as text, and the formats of columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from adtrain.bench.timing.roofline import Rates
from adtrain.bench.timing.sampling import NOISY, Time
from adtrain.text import CellFormat


def milliseconds(ms: float) -> str:
    """Four significant digits, at most down to nanoseconds."""
    decimals = 3 - math.floor(math.log10(abs(ms))) if ms else 0
    return f"{ms:.{min(max(decimals, 0), 6)}f}"


def time(found: Time) -> str:
    """The median in milliseconds, marked with "~" if it is noisy."""
    return f"{'~' if found.noisy else ''}{milliseconds(found.median_ms)}"


def interval(found: Time) -> str:
    """The confidence interval of a time."""
    return f"{milliseconds(found.low_ms)} to {milliseconds(found.high_ms)}"


def duration(ms: float) -> str:
    """Four digits in ms or µs: "60.77 ms", "50.24 µs"."""
    return f"{ms:.4g} ms" if ms >= 1 else f"{ms * 1e3:.4g} µs"


def rate(billions: float) -> str:
    """GFLOP/s or GB/s; empty for 0."""
    if not billions:
        return ""
    return f"{billions:,.0f}" if billions >= 100 else f"{billions:.3g}" if billions >= 0.01 else "<0.01"


def share(part: float) -> str:
    return f"{part:.1%}" if part else ""


def factor(ratio: float) -> str:
    """A factor in three digits."""
    if ratio < 0.1:
        return f"{ratio:.3g}"
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"


def joined(*words: str) -> str:
    """The words that are not empty, with spaces."""
    return " ".join(word for word in words if word)


NAMES = CellFormat(left=True, breaks="+")
MS = CellFormat(time)
RANGE = CellFormat(interval)
RATE = CellFormat(rate)
SHARE = CellFormat(share)
FACTOR = CellFormat(factor)
ERROR = CellFormat("{:.0e}".format)


def of_peak(row: Rates) -> str:
    """The share of the roofline; "cached" where the data moved faster than in a large copy."""
    return "cached" if row.from_cache else share(row.of_roofline or 0.0)


def cache_note(rows: Iterable[Rates]) -> list[str]:
    """What "cached" means, if any of the rows has it."""
    note = "cached: the bytes came faster than the memory can deliver them, so from a cache"
    return [note] if any(row.from_cache for row in rows) else []


def launch(shape: Mapping[str, Any]) -> str:
    """A launch: "132x1x1 of 256x1x1, 34816 B" (grid, block, shared memory), or "2 threads" on a CPU."""
    if "grid" not in shape:
        return f"{shape['threads']} threads" if shape else ""
    grid, block = ("x".join(map(str, shape[name])) for name in ("grid", "block"))
    return f"{grid} of {block}" + (f", {shape['shared_bytes']} B" if shape["shared_bytes"] else "")


@dataclass(frozen=True)
class Ratio:
    """A ratio of two times, and its 95% interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        """The interval."""
        return f"{factor(self.low)} to {factor(self.high)}"

    @property
    def noisy(self) -> bool:
        return self.high - self.low > NOISY * self.median
