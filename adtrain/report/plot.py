"""Draws plots as SVG, with round numbers along the axes.

The colours come from the page's CSS, so that they follow its light or dark scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, floor, hypot, log, log10
from typing import NamedTuple

from markupsafe import Markup

from adtrain.templates import macro

Point = tuple[float, float]
LEFT, RIGHT, TOP, BOTTOM = 54, 22, 10, 38
HEAD = 6
"""The length of an arrow's head."""


def tick_text(x: float, digits: int = 6) -> str:
    """A number at an axis: "0.05", "2048", "200k", "1.5M"."""
    if 1e4 <= abs(x) < 1e9:
        unit, prefix = (1e6, "M") if abs(x) >= 1e6 else (1e3, "k")
        return f"{x / unit:.{digits}g}{prefix}"
    return f"{x:g}" if abs(x) >= 1 else f"{x:.{digits}g}"


class Axis(NamedTuple):
    """An axis from the first to the last tick; `text` formats the ticks."""

    title: str
    ticks: Sequence[float]
    text: Callable[[float], str] = tick_text
    logarithmic: bool = False

    def share(self, value: float) -> float:
        """The position of a value along the axis: 0 at the first tick, 1 at the last."""
        low, high = self.ticks[0], self.ticks[-1]
        if self.logarithmic:
            return log(value / low) / log(high / low)
        return (value - low) / (high - low)


class Shape(NamedTuple):
    """An SVG element. `kind` is its CSS classes."""

    tag: str
    kind: str
    attributes: Mapping[str, str]
    tooltip: str = ""
    text: str = ""


class Drawing:
    """A drawing of `width` x `height` units that scales to the width of its container.

    `description` is for screen readers. `kind` is the CSS classes of a shape, which set its colour.
    """

    def __init__(self, description: str, width: int, height: int) -> None:
        self.description, self.width, self.height = description, width, height
        self.shapes: list[Shape] = []

    def stroke(self, points: Sequence[Point], kind: str, tooltip: str = "") -> None:
        """A line through points in the drawing's coordinates."""
        self.shapes.append(Shape("polyline", kind, {"points": _text(points)}, tooltip))

    def text(self, at: Point, text: str, kind: str, anchor: str = "start") -> None:
        """Text at the drawing's coordinates `at`."""
        position = {"x": f"{at[0]:.1f}", "y": f"{at[1]:.1f}", "text-anchor": anchor}
        self.shapes.append(Shape("text", kind, position, text=text))

    def svg(self) -> Markup:
        return macro("plot.svg.j2", "in_page")(self)


class Plot(Drawing):
    """A drawing with two axes. Points are given in their units."""

    def __init__(self, description: str, x: Axis, y: Axis, width: int = 360, height: int = 220) -> None:
        super().__init__(description, width, height)
        self.x, self.y = x, y
        top = TOP + (14 if y.title else 0)
        self.box = LEFT, top, width - LEFT - RIGHT, height - top - BOTTOM
        for tick in y.ticks:
            down = self.at(x.ticks[0], tick)[1]
            self.shapes.append(Shape("path", "grid", {"d": f"M{LEFT} {down:.1f}H{width - RIGHT}"}))
            self.text((LEFT - 6, down + 3.5), y.text(tick), "axis", "end")
        for tick in x.ticks:
            self.text((self.at(tick, y.ticks[0])[0], height - BOTTOM + 16), x.text(tick), "axis", "middle")
        self.text(((LEFT + width - RIGHT) / 2, height - 5), x.title, "axis", "middle")
        if y.title:
            self.text((4, 12), y.title, "axis")

    def at(self, x: float, y: float) -> Point:
        """The drawing's coordinates of the point (x, y)."""
        left, top, width, height = self.box
        return left + self.x.share(x) * width, top + (1 - self.y.share(y)) * height

    def image(self, address: str, corner: Point, opposite: Point) -> None:
        """A picture between two points, the lower left and the upper right corner."""
        (left, bottom), (right, top) = self.at(*corner), self.at(*opposite)
        size = {"x": left, "y": top, "width": right - left, "height": bottom - top}
        attributes = {name: f"{number:.1f}" for name, number in size.items()}
        self.shapes.append(Shape("image", "", {**attributes, "href": address, "preserveAspectRatio": "none"}))

    def line(self, points: Iterable[Point], kind: str) -> None:
        self.stroke([self.at(*point) for point in points], kind)

    def band(self, low: Sequence[Point], high: Sequence[Point], kind: str) -> None:
        """The area between two lines."""
        edge = [self.at(*point) for point in (*low, *reversed(high))]
        self.shapes.append(Shape("polygon", f"band {kind}", {"points": _text(edge)}))

    def marker(self, x: float, y: float, kind: str, tooltip: str, radius: float = 3) -> None:
        """A point with a tooltip."""
        left, top = self.at(x, y)
        circle = {"cx": f"{left:.1f}", "cy": f"{top:.1f}", "r": f"{radius:g}"}
        self.shapes.append(Shape("circle", f"marker {kind}", circle, tooltip))

    def arrow(self, start: Point, end: Point, kind: str, gap: float = 0) -> None:
        """An arrow between two points in the drawing's coordinates, which ends `gap` before `end`."""
        across, down = end[0] - start[0], end[1] - start[1]
        length = hypot(across, down)
        if length <= gap + HEAD:
            return
        right, below = across / length, down / length
        tip = end[0] - right * gap, end[1] - below * gap
        back = tip[0] - right * HEAD, tip[1] - below * HEAD
        sides = [(back[0] + side * below * HEAD / 2, back[1] - side * right * HEAD / 2) for side in (1, -1)]
        self.stroke([start, tip, sides[0], tip, sides[1]], kind)


def _text(points: Iterable[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


SMALLEST = 1e-300
"""Numbers below this magnitude are drawn as 0."""

MOST_DECADES = 7
"""A logarithmic axis over more powers of ten than this has a tick at every second one, or at fewer."""


def ticks(low: float, high: float, whole: bool = False) -> Sequence[float]:
    """At least two equidistant round numbers from at most `low` to at least `high`; integers with `whole`."""
    if max(abs(low), abs(high)) < SMALLEST:
        low = high = 0.0
    if high - low <= 1e-6 * max(abs(low), abs(high)):
        low, high = min(low, 0.0), max(high, 0.0) or 1.0
    rough = (high - low) / 5
    power = 10.0 ** floor(log10(rough))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough * 0.999)
    if whole:
        step = max(1.0, step)
    first, last = floor(round(low / step, 6)), ceil(round(high / step, 6))
    return [float(f"{i * step:.9g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> Sequence[float]:
    """Powers of ten from at most `low` to at least `high`, both above 0; up to two decades also 2 and 5 times those.

    If 1 lies in this range, it is one of the ticks.
    """
    if high / low <= 100:
        numbers = [size * 10.0**k for k in range(floor(log10(low)) - 1, ceil(log10(high)) + 2) for size in (1, 2, 5)]
        first = max(i for i, x in enumerate(numbers) if x <= low * 1.001)
        last = min(i for i, x in enumerate(numbers) if x >= high * 0.999)
        return [float(f"{x:.9g}") for x in numbers[first : max(last, first + 1) + 1]]
    first, last = floor(log10(low)), ceil(log10(high))
    step = -(-(last - first) // MOST_DECADES)
    return [10.0**k for k in range(first // step * step, last + step, step)]
