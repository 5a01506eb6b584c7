"""Line charts over sizes, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from adtrain.bench.page import blocks, cells
from adtrain.report.plot import Axis, Plot, Point
from adtrain.report.ticks import log_ticks

MAX_TICKS = 7


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
    return blocks.figure(title, plot.svg(), note, [(line.kind, line.name) for line in lines])


def _thinned(sizes: Sequence[float]) -> Sequence[float]:
    """At most MAX_TICKS of the sizes, evenly spaced, with the first and the last."""
    step = -(-(len(sizes) - 1) // (MAX_TICKS - 1)) or 1
    chosen = [x for i, x in enumerate(sizes[:-1]) if i % step == 0 and i + step <= len(sizes) - 1]
    return [*(chosen or sizes[:1]), sizes[-1]]
