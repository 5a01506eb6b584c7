"""A result of `adtrain bench` as one HTML file without scripts or external files, with charts on logarithmic axes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import ceil, log10
from typing import Any, NamedTuple

from markupsafe import Markup

from adtrain import templates
from adtrain.bench.machine import Protocol, Roofline
from adtrain.bench.result import Result, TimedResult, outliers, timings, warnings
from adtrain.bench.sampling import Time
from adtrain.bench.view import MINOR_RANK, Column, Note, Part, Picture, Ratio, Section, Table, Tiles, factor, interval
from adtrain.report.plot import Axis, Plot, Point, log_ticks, tick_text
from adtrain.templates import environment, macro

details, figures, hint, keys, listed, matrix, named, rows, stack, timeline, two_lines, _axis, _chart, _lane = (
    macro("parts.html.j2", name)
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


WIDTH, HEIGHT = 480, 340
LETTER, LINE = 6.0, 12
"""Width of a letter and height of a line of names, in units of the picture."""

MAX_NAMES = 14
DECADES = 5
"""The most powers of ten that an axis covers below its largest value. Points below them are drawn at the border."""
LEADERS = (22, 40, 60)
"""Distances of names without room next to their point, which get a line to it."""


class Dot(NamedTuple):
    """A point for work of `ms` milliseconds. `name` is drawn next to it if there is room, and if it is not empty."""

    name: str
    tooltip: str
    flops: int
    bytes: int
    ms: float
    radius: float = 3
    kind: str = ""

    @property
    def place(self) -> Point:
        """FLOPs a byte, and GFLOP/s."""
        return self.flops / self.bytes, self.flops / self.ms * 1e-6

    @property
    def drawn(self) -> bool:
        return bool(self.flops and self.bytes and self.ms)


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

    def at(self, intensity: float) -> float:
        """The best GFLOP/s of work with these FLOPs a byte."""
        return min(self.arithmetic, intensity * self.memory)

    def line(self, xs: Sequence[float], ys: Sequence[float]) -> dict[str, tuple[Point, Point]]:
        """The parts of the roof inside of the axes, by the limit."""
        found = {}
        left, right = max(xs[0], ys[0] / self.memory), min(xs[-1], self.ridge, ys[-1] / self.memory)
        if left < right:
            found["memory"] = ((left, left * self.memory), (right, right * self.memory))
        left = max(xs[0], self.ridge)
        if left < xs[-1] and ys[0] <= self.arithmetic <= ys[-1]:
            found["arithmetic"] = ((left, self.arithmetic), (xs[-1], self.arithmetic))
        return found


def rooflines(
    groups: Mapping[str, Sequence[Dot]],
    peak: Roofline,
    precision: str,
    arrows: Sequence[tuple[Dot, Dot]] = (),
) -> Markup:
    """The roofline of a device with operations as points (S. Williams, A. Waterman, D. Patterson, Roofline: an
    insightful visual performance model for multicore architectures, Communications of the ACM 52, 2009).

    A picture for each group that has points, on the same axes, with a legend. `arrows` connect two points each. The
    axes cover the points, and the roof above the point that is closest to it.
    """
    rates = peak.gflops_per_s
    kind = precision if precision in rates else "float32"
    roof = Roof(peak.gbytes_per_s, rates[kind])
    shown = {title: [dot for dot in dots if dot.drawn] for title, dots in groups.items()}
    drawn = [dot.place for dots in shown.values() for dot in dots]
    if not drawn:
        return templates.note("No operation here has FLOPs.")
    closest, _ = max(drawn, key=lambda place: place[1] / roof.at(place[0]))
    xs = log_ticks(*_ends([x for x, _ in drawn]))
    ys = log_ticks(*_ends([*(y for _, y in drawn), roof.at(closest)]))
    legend = [
        ("memory", f"limited by memory: {roof.memory:,.1f} GB/s of a large copy"),
        ("arithmetic", f"by arithmetic: {roof.arithmetic:,.1f} GFLOP/s of {kind} products"),
    ]
    pictures = [_figure(title, dots, roof, xs, ys, arrows) for title, dots in shown.items() if dots]
    left_out = sum(map(len, groups.values())) - len(drawn)
    note = "A point is an operation; the line is the measured peak of the device, which data in caches may exceed."
    note += f" {left_out} without FLOPs are left out." if left_out else ""
    return keys(legend) + figures(pictures, "wide-curves") + templates.note(note)


def _figure(
    title: str,
    dots: Sequence[Dot],
    roof: Roof,
    xs: Sequence[float],
    ys: Sequence[float],
    arrows: Sequence[tuple[Dot, Dot]],
) -> Markup:
    x, y = (Axis(unit, ticks, power_text, logarithmic=True) for unit, ticks in (("FLOP / byte", xs), ("GFLOP/s", ys)))
    plot = Plot(f"{title}: GFLOP/s over FLOP/byte", x, y, WIDTH, HEIGHT)
    lines = roof.line(xs, ys)
    for kind, line in lines.items():
        plot.line(line, f"roof {kind}")
    for start, end in arrows:
        plot.arrow(_at(plot, start), _at(plot, end), "arrow", end.radius + 1)
    for dot in sorted(dots, key=lambda dot: -dot.radius):
        kind = "memory" if dot.place[0] < roof.ridge else "arithmetic"
        plot.marker(*_inside(plot, dot), f"{kind} {dot.kind}".strip(), dot.tooltip, dot.radius)
    covered = [point for dot in dots for point in _around(_at(plot, dot), dot.radius)]
    crossed = [point for a, b in lines.values() for point in _between(plot.at(*a), plot.at(*b))]
    for at, name, leader in _names(plot, [dot for dot in dots if dot.name], covered, crossed):
        if leader:
            plot.stroke(leader, "leader")
        plot.text(at, name, "name")
    return _chart(title, plot.svg())


def _around(at: Point, radius: float) -> list[Point]:
    """The centre of a circle and four points on it."""
    return [(at[0] + radius * x, at[1] + radius * y) for x, y in ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))]


def _between(a: Point, b: Point) -> list[Point]:
    """Points on a line, closer together than the height of a name."""
    parts = ceil(max(abs(b[0] - a[0]), abs(b[1] - a[1])) / (LINE / 2)) or 1
    return [(a[0] + (b[0] - a[0]) * i / parts, a[1] + (b[1] - a[1]) * i / parts) for i in range(parts + 1)]


def _names(
    plot: Plot, dots: Sequence[Dot], covered: Sequence[Point], lines: Sequence[Point]
) -> Iterator[tuple[Point, str, Sequence[Point]]]:
    """Position and text of the names that have room, each at its largest dot, and the line to the dot if the name is
    not next to it. Names avoid all points and each other's lines, and if possible the lines of the roof."""
    largest = {dot.name: dot for dot in sorted(dots, key=_size)}
    taken: list[Box] = []
    leaders: list[Point] = []
    for dot in sorted(largest.values(), key=_size, reverse=True)[:MAX_NAMES]:
        at = _at(plot, dot)
        free = [
            (box, leader)
            for box, leader in ((box, _leader(at, dot, box)) for box in _boxes(plot, dot))
            if not (box.contains(covered) or box.contains(leaders) or any(map(box.overlaps, taken)))
            and not any(other.contains(leader) for other in taken)
        ]
        if free:
            box, leader = next(((box, leader) for box, leader in free[:8] if not box.contains(lines)), free[0])
            taken.append(box)
            leaders += leader
            yield (box.left, box.bottom - 2), dot.name, leader


def _leader(at: Point, dot: Dot, box: Box) -> Sequence[Point]:
    """Points on the line from a dot to its name; none if the name is next to the dot."""
    end = min(max(at[0], box.left), box.right), box.top + LINE / 2
    far = abs(end[0] - at[0]) + abs(end[1] - at[1]) > dot.radius + LINE
    return _between(at, end) if far else []


def _boxes(plot: Plot, dot: Dot) -> Iterator[Box]:
    """The places of a name inside of the picture: next to its dot first, then further away."""
    left, top, width, height = plot.box
    x, y = _at(plot, dot)
    long, off, beyond = len(dot.name) * LETTER, dot.radius + 3, dot.radius + 1
    places = [(x + off, y - LINE / 2), (x - off - long, y - LINE / 2)]
    places += product((x - long / 2, x, x - long), (y - beyond - LINE, y + beyond))
    for away in LEADERS:
        places += product((x + away, x - away - long), (y - away - LINE, y + away, y - LINE / 2))
    for at in places:
        if left < at[0] < left + width - long and 0 < at[1] < top + height - LINE:
            yield Box(*at, at[0] + long, at[1] + LINE)


def _size(dot: Dot) -> tuple[float, int]:
    return dot.radius, dot.flops


def _ends(values: Iterable[float]) -> tuple[float, float]:
    """The range of an axis: that of the values, but at most DECADES powers of ten below the largest one."""
    found = list(values)
    return max(min(found), max(found) / 10**DECADES), max(found)


def _inside(plot: Plot, dot: Dot) -> Point:
    """The values of a dot, or those of the border if the axes do not reach to it."""
    x, y = dot.place
    return max(x, plot.x.ticks[0]), max(y, plot.y.ticks[0])


def _at(plot: Plot, dot: Dot) -> Point:
    """The place of a dot in the picture."""
    return plot.at(*_inside(plot, dot))


def render(result: Result) -> str:
    """The page of a result."""
    view, timed = result.view(), result if isinstance(result, TimedResult) else None
    return environment().get_template("bench.html.j2").render(
        title=f"adtrain bench: {view.title}",
        heading=view.title,
        about=view.about or (_about(timed.protocol) if timed else ""),
        made=result.made,
        notices=warnings(timed) if timed else [],
        body=drawn(view.parts),
        protocol=dict(_protocol(timed)) if timed else None,
    )  # fmt: skip


def drawn(found: Iterable[Part]) -> Iterator[Markup]:
    """The parts that a page shows."""
    for part in found:
        if part.where == "text":
            continue
        match part:
            case Note():
                yield (templates.notice if part.notice else templates.note)(part.text)
            case Tiles():
                yield templates.tiles(part.found)
            case Picture():
                yield part.draw()
            case Table():
                yield table(part)
            case Section():
                content = Markup().join(drawn(part.parts))
                yield templates.section(part.title, details(part.folded, content) if part.folded else content)


def table(found: Table[Any]) -> Markup:
    """The table with its notes."""
    shown = [column for column in found.columns if column.where != "text"]
    largest = [max((column.bar(row)[0] for row in found.rows), default=0.0) if column.bar else 0.0 for column in shown]
    rows = [[_cell(column, row, most) for column, most in zip(shown, largest, strict=True)] for row in found.rows]
    if any(column.foot for column in shown):
        rows.append([column.foot() if column.foot else Markup() for column in shown])
    titles = _distinct([column.title for column in shown])
    classes = dict(zip(titles, map(_classes, shown), strict=True))
    return templates.table(classes, rows, found.kind) + Markup().join(map(templates.note, found.notes))


def _cell(column: Column[Any], row: Any, largest: float) -> str:
    if column.drawn:
        return column.drawn(row)
    value = column.of(row)
    text: str = "" if value is None else column.format.write(value)
    if isinstance(value, Time) and text == column.text(row) and column.format.write is not interval:
        text = hint(text, f"95% interval {interval(value)} ms; {value.samples} samples of {value.repeats}")
    elif column.format.breaks:
        text = templates.breakable(text.split(column.format.breaks), column.format.breaks)
    if column.bar:
        length, kind = column.bar(row)
        text = templates.bar(length / largest if largest else 0.0, text, kind)
    return text


def _classes(column: Column[Any]) -> str:
    if column.drawn:
        return "lane-cell"
    classes = ["text word"] if column.format.left else []
    return " ".join([*classes, "minor"] if column.minor or column.rank >= MINOR_RANK else classes)


def _distinct(titles: Sequence[str]) -> list[str]:
    """The titles, with spaces after those that occur several times: they are keys of the template's mapping."""
    found: list[str] = []
    for title in titles:
        while title in found:
            title += " "
        found.append(title)
    return found


def _about(protocol: Protocol) -> str:
    commit = f"commit {protocol.commit}" if protocol.commit else f"adtrain {protocol.versions['adtrain']}"
    return " · ".join([protocol.device, protocol.device_name, commit])


def _protocol(result: TimedResult) -> Iterator[tuple[str, str]]:
    """Names and values of the protocol's entries."""
    about = result.protocol
    for name in ("commit", "device", "device_name"):
        if value := getattr(about, name):
            yield name.replace("_", " "), value
    for device, name in (about.devices or {}).items():
        yield f"device {device}", name
    yield "cores, threads", f"{about.cores}, {about.threads}"
    if about.load is not None:
        yield "load before", f"{about.load:.2f}"
    if about.clock_mhz:
        yield "driver", about.driver or ""
        yield "clocks", f"{about.clock_mhz:.0f} MHz, memory {about.memory_clock_mhz:.0f} MHz"
    yield "compiler", about.compiler or ""
    if about.naive:
        yield "naive loops", about.naive
    yield "NumPy's BLAS", f"{about.blas}, {about.blas_threads} threads"
    yield "versions", ", ".join(f"{name} {version}" for name, version in about.versions.items())
    for what, clock in about.clock.items():
        yield f"clock of {what}", clock
    if any(timings(result)):
        low, high = about.samples
        samples = f"{low} to {high} of at least {about.min_sample_ms:g} ms"
        yield "samples", f"{samples}; intervals of {about.confidence:.0%} confidence"
    yield "an empty run", f"{about.overhead_ms * 1e6:.0f} ns"
    if peak := about.roofline:
        yield "copy", f"{peak.gbytes_per_s:,.1f} GB/s"
        yield "matrix products", ", ".join(f"{name} {x:,.1f} GFLOP/s" for name, x in peak.gflops_per_s.items())
    if remark := outliers(result):
        yield "outliers", remark
