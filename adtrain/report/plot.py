"""Draws plots as SVG. The colours come from the page's CSS, so that they follow its light or dark scheme.

The CSS classes are `axis` (text), `grid`, `curve`, `marker` and `band`, combined with the class `kind` of an element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import log
from typing import NamedTuple

from adtrain.report.markup import Markup, html, join

Point = tuple[float, float]
LEFT, RIGHT, TOP, BOTTOM = 54, 18, 10, 38


class Axis(NamedTuple):
    """An axis from the first to the last tick; `text` formats the ticks."""

    title: str
    ticks: Sequence[float]
    text: Callable[[float], str] = "{:g}".format
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """The position of a value along the axis: 0 at the first tick, 1 at the last."""
        low, high = self.ticks[0], self.ticks[-1]
        if self.logarithmic:
            return log(value / low) / log(high / low)
        return (value - low) / (high - low)


class Plot:
    """A drawing of `width` x `height` units that scales to the width of its container.

    `description` is for screen readers.
    """

    def __init__(self, description: str, x: Axis, y: Axis, width: int = 360, height: int = 220) -> None:
        self.x, self.y, self.width, self.height = x, y, width, height
        self.parts = [html('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">', width, height, description)]
        top = TOP + (14 if y.title else 0)
        self.box = LEFT, top, width - LEFT - RIGHT, height - top - BOTTOM
        for tick in y.ticks:
            down = self.at(x.ticks[0], tick)[1]
            self.parts.append(html('<path class="grid" d="M{} {:.1f}H{}"/>', LEFT, down, width - RIGHT))
            self._label(LEFT - 6, down + 3.5, y.text(tick), "end")
        for tick in x.ticks:
            self._label(self.at(tick, y.ticks[0])[0], height - BOTTOM + 16, x.text(tick))
        self._label((LEFT + width - RIGHT) / 2, height - 5, x.title)
        if y.title:
            self._label(4, 12, y.title, "start")

    def at(self, x: float, y: float) -> Point:
        """The drawing's coordinates of the point (x, y)."""
        left, top, width, height = self.box
        return left + self.x.share(x) * width, top + (1 - self.y.share(y)) * height

    def line(self, points: Iterable[Point], kind: str) -> None:
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.at(*point) for point in points))
        self.parts.append(html('<polyline class="{}" points="{}"/>', kind, drawn))

    def band(self, low: Sequence[Point], high: Sequence[Point], kind: str) -> None:
        """The area between two lines."""
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.at(*point) for point in [*low, *reversed(high)]))
        self.parts.append(html('<polygon class="band {}" points="{}"/>', kind, drawn))

    def marker(self, x: float, y: float, kind: str, tooltip: str, radius: float = 3) -> None:
        """A point with a tooltip."""
        left, top = self.at(x, y)
        circle = html('cx="{:.1f}" cy="{:.1f}" r="{:g}"', left, top, radius)
        self.parts.append(html('<circle class="marker {}" {}><title>{}</title></circle>', kind, circle, tooltip))

    def text(self, at: Point, text: str, kind: str, anchor: str = "start") -> None:
        """Text at the drawing's coordinates `at`."""
        position = html('x="{:.1f}" y="{:.1f}" text-anchor="{}"', *at, anchor)
        self.parts.append(html('<text class="{}" {}>{}</text>', kind, position, text))

    def svg(self) -> Markup:
        return join([*self.parts, Markup("</svg>")])

    def _label(self, x: float, y: float, text: str, anchor: str = "middle") -> None:
        self.text((x, y), text, "axis", anchor)
