"""Line charts over sizes, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from adtrain.bench.page import cells
from adtrain.report import parts
from adtrain.report.plot import Axis, Plot, Point
from adtrain.report.ticks import log_ticks

MOST_TICKS = 7


class Line(NamedTuple):
    """Points over sizes, which ascend.

    Attributes:
        low, high: the ends of their intervals.
        crosses: the size from which on they are above the level.
    """

    name: str
    kind: str
    points: Sequence[Point]
    low: Sequence[Point] = ()
    high: Sequence[Point] = ()
    crosses: float | None = None


def figure(title: str, size: str, unit: str, lines: Sequence[Line], level: float | None = None, note: str = "") -> str:
    """The lines with their legend.

    Args:
        size, unit: what is along the axes.
        level: a value to be compared with, drawn across.
        note: text that stands below the title.
    """
    sizes = sorted({x for line in lines for x, _ in line.points})
    values = [y for line in lines for points in (line.points, line.low, line.high) for _, y in points]
    values += [] if level is None else [level]
    ys = log_ticks(min(values), max(values))
    x = Axis(size, _thinned(sizes), cells.size, logarithmic=True)
    plot = Plot(title, x, Axis(unit, ys, cells.size, logarithmic=True))
    if level is not None:
        plot.line([(sizes[0], level), (sizes[-1], level)], "level")
    for line in lines:
        if line.low:
            plot.band(line.low, line.high, line.kind)
    for line in lines:
        plot.line(line.points, f"curve {line.kind}")
        for at, y in line.points:
            plot.marker(at, y, line.kind, f"{line.name} at {at:,g}: {cells.factor(y)}")
        if line.crosses is not None and level is not None:
            plot.marker(line.crosses, level, f"crossing {line.kind}", f"{line.name}: from {line.crosses:,.0f}", 5)
    keys = "".join(parts.key(line.kind, escape(line.name)) for line in lines)
    said = f'<span class="said">{escape(note)}</span>' if note else ""
    caption = f"<figcaption><strong>{escape(title)}</strong>{said}{keys}</figcaption>"
    return f"<figure>{caption}{plot.svg()}</figure>\n"


def _thinned(sizes: Sequence[float]) -> Sequence[float]:
    """The sizes themselves; where there are many, some of them with the first and the last."""
    step = -(-(len(sizes) - 1) // (MOST_TICKS - 1)) or 1
    kept = [x for i, x in enumerate(sizes[:-1]) if i % step == 0 and i + step <= len(sizes) - 1]
    return [*(kept or sizes[:1]), sizes[-1]]
