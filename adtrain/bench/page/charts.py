"""Charts of these pages: curves over sizes, and ratios with their intervals, on logarithmic axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from math import log10
from typing import Any, NamedTuple

from markupsafe import Markup

from adtrain.bench.cells import Ratio, factor
from adtrain.report.plot import Axis, Plot, Point, log_ticks, tick_text
from adtrain.templates import macro

details, figures, hint, keys, listed, matrix, named, rows, stack, timeline, two_lines, _axis, _chart, _lane = (
    macro("bench_parts.html.j2", name)
    for name in (
        "details", "figures", "hint", "keys", "listed", "matrix", "named", "rows", "stack", "timeline", "two_lines",
        "axis", "figure", "lane",
    )
)  # fmt: skip

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
MAX_TICKS = 7

size_text = partial(tick_text, digits=3)
"""A size at an axis, such as 16.4k."""


class Line(NamedTuple):
    """Points over ascending sizes.

    Attributes:
        kind: the CSS class with the colour.
        low, high: the ends of the points' intervals.
        crosses: the size at which the line crosses the level.
    """

    name: str
    kind: str
    points: Sequence[Point]
    low: Sequence[Point] = ()
    high: Sequence[Point] = ()
    crosses: float | None = None


def figure(
    title: str, size: str, unit: str, lines: Sequence[Line], level: float | None = None, note: str = ""
) -> Markup:
    """The lines with their legend.

    Args:
        size, unit: labels of the axes.
        level: a reference value, drawn as a horizontal line.
        note: text below the title.
    """
    sizes = sorted({x for line in lines for x, _ in line.points})
    values = [y for line in lines for points in (line.points, line.low, line.high) for _, y in points]
    values += [] if level is None else [level]
    ys = log_ticks(min(values), max(values))
    x = Axis(size, _thinned(sizes), size_text, logarithmic=True)
    plot = Plot(title, x, Axis(unit, ys, size_text, logarithmic=True))
    if level is not None:
        plot.line([(sizes[0], level), (sizes[-1], level)], "level")
    for line in lines:
        if line.low:
            plot.band(line.low, line.high, line.kind)
    for line in lines:
        plot.line(line.points, f"curve {line.kind}")
        for at, y in line.points:
            plot.marker(at, y, line.kind, f"{line.name} at {at:,g}: {factor(y)}")
        if line.crosses is not None and level is not None:
            plot.marker(line.crosses, level, f"crossing {line.kind}", f"{line.name}: from {line.crosses:,.0f}", 5)
    return _chart(title, plot.svg(), note, [(line.kind, line.name) for line in lines])


def _thinned(sizes: Sequence[float]) -> Sequence[float]:
    """At most MAX_TICKS of the sizes, evenly spaced, with the first and the last."""
    step = -(-(len(sizes) - 1) // (MAX_TICKS - 1)) or 1
    chosen = [x for i, x in enumerate(sizes[:-1]) if i % step == 0 and i + step <= len(sizes) - 1]
    return [*(chosen or sizes[:1]), sizes[-1]]


def power_text(n: float) -> str:
    """A power of ten at an axis: "0.01", "10,000", "10⁶"."""
    return f"{n:,g}" if 1e-3 <= n < 1e5 else "10" + f"{round(log10(n))}".translate(SUPERSCRIPTS)


class Scale:
    """An axis that covers 1 and the intervals of all ratios."""

    def __init__(self, ratios: Iterable[Ratio]) -> None:
        values = [1.0, *(end for ratio in ratios for end in (ratio.low, ratio.high))]
        self.ticks: Sequence[float] = log_ticks(min(values), max(values))
        self.share = Axis("", self.ticks, logarithmic=True).share

    def percent(self, ratio: float) -> float:
        """The position of the ratio on the axis."""
        return 100 * self.share(ratio)

    def lane(self, marks: Iterable[tuple[str, str, Ratio]]) -> Markup:
        """The medians as points and their intervals as lines, one below the other, over the grid.

        Args:
            marks: for each ratio the CSS class with its colour, its name, and the ratio itself.
        """
        found = list(marks)
        drawn = [self._mark(round(100 * (i + 1) / (len(found) + 1)), *mark) for i, mark in enumerate(found)]
        return _lane([(self.percent(tick), tick == 1) for tick in self.ticks], drawn)

    def axis(self) -> Markup:
        """The labels of the ticks."""
        one = self.ticks.index(1.0)
        return _axis([(self.percent(tick), f"{tick:g}", (i - one) % 2) for i, tick in enumerate(self.ticks)])

    def _mark(self, down: int, kind: str, name: str, ratio: Ratio) -> dict[str, Any]:
        low, at, high = map(self.percent, (ratio.low, ratio.median, ratio.high))
        tooltip = f"{name}: {factor(ratio.median)}, {ratio}"
        return {"kind": kind, "down": down, "low": low, "at": at, "high": high, "tooltip": tooltip}


def chart(title: str, plot: Plot) -> Markup:
    """A drawing with its title."""
    return _chart(title, plot.svg())
