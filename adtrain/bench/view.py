"""What a terminal and a page show of a result: tables, notes and pictures, made once for both, and values as text.

A kind of result returns a `View`; `result.py` writes it as text, `page.py` as HTML. A new column of a table is two
edits: a field or a property of its rows, and a `Column`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeAlias

from adtrain import table
from adtrain.bench.machine import Rates
from adtrain.bench.sampling import NOISY, Time
from adtrain.table import TEXT, CellFormat, Row


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


if TYPE_CHECKING:
    from markupsafe import Markup

Where: TypeAlias = Literal["both", "text", "page"]
"""Where a part is shown: in a terminal, on a page, or in both."""

MINOR_RANK = 3
"""Narrow windows leave out the columns of a page with this rank or a higher one."""


@dataclass(frozen=True)
class Column(table.Column[Row]):
    """A column of a table, with what a page shows of it.

    Attributes:
        bar: from a row to the number that a bar shows, relative to the largest one, and its CSS class.
        drawn: from a row to a picture in place of the value. A terminal has no such column.
        foot: the cell below all rows of a column with `drawn`.
        minor: whether a narrow page leaves the column out, as it does those from MINOR_RANK on.
        where: where the column is shown.
    """

    bar: Callable[[Row], tuple[float, str]] | None = None
    drawn: Callable[[Row], Markup] | None = None
    foot: Callable[[], Markup] | None = None
    minor: bool = False
    where: Where = "both"


@dataclass(frozen=True)
class Table(Generic[Row]):
    """A table.

    Attributes:
        notes: lines below the table.
        title: a line above the table in a terminal; a page has sections.
        sums: the texts of a last row in a terminal, which adds up the columns.
        kind: the CSS class of the table on a page.
    """

    columns: Sequence[Column[Row]]
    rows: Sequence[Row]
    notes: Sequence[str] = ()
    title: str = ""
    sums: Sequence[str] = ()
    kind: str = ""
    where: Where = "both"


@dataclass(frozen=True)
class Note:
    """A line of text. A page shows a `notice` such that a reader does not miss it."""

    text: str
    where: Where = "both"
    notice: bool = False


GAP = Note("", "text")
"""An empty line in a terminal."""


@dataclass(frozen=True)
class Tiles:
    """For a page: names and values in large print, some with a note and a CSS class."""

    found: Sequence[tuple[str, ...]]
    where: Where = "page"


@dataclass(frozen=True)
class Picture:
    """For a page: what `draw` returns."""

    draw: Callable[[], Markup]
    where: Where = "page"


@dataclass(frozen=True)
class Section:
    """Parts under a heading, which only a page has.

    Attributes:
        folded: the line that a reader of the page clicks on to see the parts; empty where they are shown.
    """

    title: str
    parts: Sequence[Part]
    folded: str = ""
    where: Where = "both"


Part: TypeAlias = Table[Any] | Note | Tiles | Picture | Section


class View(NamedTuple):
    """What is shown of a result.

    Attributes:
        title: the heading of a page.
        about: the line below it; empty for that of the protocol.
    """

    title: str
    parts: Sequence[Part]
    about: str = ""


RATES: tuple[Column[Any], ...] = (
    Column("GFLOP/s", lambda row: row.gflops_per_s, RATE, rank=4),
    Column("GB/s", lambda row: row.gbytes_per_s, RATE, rank=5),
    Column("of peak", of_peak, rank=3),
)
"""Columns of rows of the type `Rates`."""

KERNELS: tuple[Column[Any], ...] = (
    Column("kernel", lambda row: " + ".join(dict.fromkeys(x.name for x in row.kernels)), TEXT, rank=6, where="text"),
    Column("launch", lambda row: " + ".join(dict.fromkeys(launch(x.launch) for x in row.kernels)), TEXT, rank=8,
           where="text"),
)  # fmt: skip
"""Columns of rows with kernels, each distinct one once."""


def headline(name: str, found: Time, text: Callable[[float], str], rate: bool = False) -> tuple[str, ...]:
    """A tile with a number that follows from a time. If the time is noisy, it has the interval and is grey.

    Args:
        text: formats the number for a time in milliseconds.
        rate: whether the number is larger for a shorter time.
    """
    if not found.noisy:
        return name, text(found.median_ms)
    ends = (found.high_ms, found.low_ms) if rate else (found.low_ms, found.high_ms)
    return name, text(found.median_ms), f"noisy: {text(ends[0])} to {text(ends[1])}", "noisy"


def ratio_headline(name: str, ratio: Ratio, text: Callable[[float], str]) -> tuple[str, ...]:
    """A tile with a ratio and its interval; grey if that is too wide."""
    return name, text(ratio.median), f"{text(ratio.low)} to {text(ratio.high)}", "noisy" if ratio.noisy else ""


def absent(skipped: dict[str, str], failed: dict[str, str]) -> list[str]:
    """Why systems were skipped or failed."""
    return [f"{system} {how}: {why}" for how, found in (("skipped", skipped), ("failed", failed))
            for system, why in found.items()]  # fmt: skip
