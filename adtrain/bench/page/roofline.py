"""The roofline of a device with operations as points (S. Williams, A. Waterman, D. Patterson, Roofline: an
insightful visual performance model for multicore architectures, Communications of the ACM 52, 2009)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from math import ceil
from typing import Any, NamedTuple

from adtrain.bench.page.cells import power
from adtrain.report import parts
from adtrain.report.markup import Markup, html, join
from adtrain.report.plot import Axis, Plot, Point
from adtrain.report.ticks import log_ticks

WIDTH, HEIGHT = 480, 340
LETTER, LINE = 6.0, 12
"""Width of a letter and height of a line of names, in units of the picture."""

MAX_NAMES = 14


class Dot(NamedTuple):
    """A point for work of `ms` milliseconds. `name` is drawn next to it if there is room."""

    name: str
    tooltip: str
    flops: int
    bytes: int
    ms: float
    radius: float = 3

    @property
    def place(self) -> Point:
        """FLOPs a byte, and GFLOP/s."""
        return self.flops / self.bytes, self.flops / self.ms * 1e-6


class Box(NamedTuple):
    """The box of a name in the picture."""

    left: float
    top: float
    right: float
    bottom: float

    def contains(self, points: Iterable[Point]) -> bool:
        return any(self.left < x < self.right and self.top < y < self.bottom for x, y in points)

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


class Roof(NamedTuple):
    """The best rates: GB/s and GFLOP/s."""

    memory: float
    arithmetic: float

    @property
    def ridge(self) -> float:
        """FLOPs a byte above which arithmetic is the limit."""
        return self.arithmetic / self.memory


def figures(groups: Mapping[str, Sequence[Dot]], peak: Mapping[str, Any], precision: str) -> Markup:
    """A picture for each group that has points, on the same axes, with a legend."""
    rates = peak["gflops_per_s"]
    kind = precision if precision in rates else "float32"
    roof = Roof(peak["gbytes_per_s"], rates[kind])
    shown = {title: [dot for dot in dots if dot.flops and dot.bytes and dot.ms] for title, dots in groups.items()}
    drawn = [dot.place for dots in shown.values() for dot in dots]
    if not drawn:
        return parts.note("No operation here has FLOPs.")
    xs = log_ticks(*_ends([*(x for x, _ in drawn), roof.ridge]))
    ys = log_ticks(*_ends([*(y for _, y in drawn), roof.arithmetic]))
    keys = parts.key("memory", html("limited by memory: <b>{:,.1f} GB/s</b> of a large copy", roof.memory))
    keys += html(" ") + parts.key(
        "arithmetic", html("by arithmetic: <b>{:,.1f} GFLOP/s</b> of {} products", roof.arithmetic, kind)
    )
    pictures = join(_figure(title, dots, roof, xs, ys) for title, dots in shown.items() if dots)
    left_out = sum(map(len, groups.values())) - len(drawn)
    note = "A point is an operation; the line is the measured peak of the device, which data in caches may exceed."
    note += f" {left_out} without FLOPs are left out." if left_out else ""
    return html(
        '<p class="keys">{}</p>\n<div class="curves wide-curves">\n{}</div>\n{}', keys, pictures, parts.note(note)
    )


def _figure(title: str, dots: Sequence[Dot], roof: Roof, xs: Sequence[float], ys: Sequence[float]) -> Markup:
    x, y = (Axis(unit, ticks, power, logarithmic=True) for unit, ticks in (("FLOP / byte", xs), ("GFLOP/s", ys)))
    plot = Plot(f"{title}: GFLOP/s over FLOP/byte", x, y, WIDTH, HEIGHT)
    start = max(xs[0], ys[0] / roof.memory)
    ends = (start, start * roof.memory), (roof.ridge, roof.arithmetic), (xs[-1], roof.arithmetic)
    for kind, line in zip(("memory", "arithmetic"), pairwise(ends), strict=True):
        plot.line(line, f"roof {kind}")
    for dot in sorted(dots, key=lambda dot: -dot.radius):
        kind = "memory" if dot.place[0] < roof.ridge else "arithmetic"
        plot.marker(*dot.place, kind, dot.tooltip, dot.radius)
    covered = [point for dot in dots for point in _around(plot.at(*dot.place), dot.radius)]
    lines = [point for a, b in pairwise(ends) for point in _between(plot.at(*a), plot.at(*b))]
    for at, name in _names(plot, dots, covered, lines):
        plot.text(at, name, "name")
    return html("<figure><figcaption><strong>{}</strong></figcaption>{}</figure>\n", title, plot.svg())


def _around(at: Point, radius: float) -> list[Point]:
    """The centre of a circle and four points on it."""
    return [(at[0] + radius * x, at[1] + radius * y) for x, y in ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))]


def _between(a: Point, b: Point) -> list[Point]:
    """Points on a line, closer together than the height of a name."""
    parts = ceil(max(abs(b[0] - a[0]), abs(b[1] - a[1])) / (LINE / 2)) or 1
    return [(a[0] + (b[0] - a[0]) * i / parts, a[1] + (b[1] - a[1]) * i / parts) for i in range(parts + 1)]


def _names(
    plot: Plot, dots: Sequence[Dot], covered: Sequence[Point], lines: Sequence[Point]
) -> Iterator[tuple[Point, str]]:
    """Position and text of the names that have room, each at its largest dot. They avoid all points, and if possible
    the lines."""
    largest = {dot.name: dot for dot in sorted(dots, key=_size)}
    left, top, width, height = plot.box
    taken: list[Box] = []
    for dot in sorted(largest.values(), key=_size, reverse=True)[:MAX_NAMES]:
        x, y = plot.at(*dot.place)
        long, off, beyond = len(dot.name) * LETTER, dot.radius + 3, dot.radius + 1
        places = [(x + off, y - LINE / 2), (x - off - long, y - LINE / 2)]
        places += product((x - long / 2, x, x - long), (y - beyond - LINE, y + beyond))
        boxes = [
            Box(*at, at[0] + long, at[1] + LINE)
            for at in places
            if left < at[0] < left + width - long and 0 < at[1] < top + height - LINE
        ]
        free = [box for box in boxes if not box.contains(covered) and not any(map(box.overlaps, taken))]
        if free:
            box = next((box for box in free if not box.contains(lines)), free[0])
            taken.append(box)
            yield (box.left, box.bottom - 2), dot.name


def _size(dot: Dot) -> tuple[float, int]:
    return dot.radius, dot.flops


def _ends(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    return min(found), max(found)
