"""The page of a config's training step: its modes, timeline, layers and kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import sqrt
from typing import Any

from adtrain.bench.page import cells, roofline
from adtrain.bench.page.curves import Line, figure
from adtrain.bench.page.roofline import Dot
from adtrain.bench.timing.records import milliseconds
from adtrain.report import parts
from adtrain.report.markup import Markup, html, join
from adtrain.report.parts import breakable

PHASES = ("forward", "backward", "update")
MIN_SHARE = 0.005
"""Share of the step below which an operation is not drawn in the roofline."""

NAMED, NAMED_ON_PHONES = 4, 15
"""Percent of the timeline that an operation must take to be named in it."""

RATES = {"GFLOP/s": "minor", "GB/s": "minor", "of peak": "minor"}
MODES = {"step": "left", "ms": "", "95% interval": "minor", "images/s": "", **RATES, "host ms": "minor", "idle": ""}
LAYERS = {"layer": "text", "forward, backward, update": "left", "ms": "", **dict.fromkeys(PHASES, "minor"), **RATES}
KERNELS = {"fused operation": "text", "layers": "text", "phase": "left minor", "ms": "", "share": "", **RATES}
BATCHES = {"batch": "", "ms": "", "95% interval": "minor", "images/s": "", **RATES, "memory planned": ""}


def title(result: Mapping[str, Any]) -> str:
    return f"{result['config']}: a training step"


def body(result: Mapping[str, Any]) -> Iterable[Markup]:
    modes, memory = result["modes"], result["memory"]
    fused = modes["fused"]
    found = [
        ("step, fused", cells.duration(fused["step"]["median_ms"])),
        ("images/s", f"{fused['images_per_second']:,.0f}"),
        ("faster than eager", f"{cells.factor(modes['eager']['step']['median_ms'] / fused['step']['median_ms'])} x"),
        ("of peak", cells.share(fused["of_roofline"])),
        ("memory planned", _mebibytes(memory["planned_bytes"])),
    ]
    if memory["held_bytes"] is not None:
        found.append(("memory measured", _mebibytes(memory["held_bytes"])))
    yield parts.tiles(found)
    yield parts.note(f"{result['batch_size']} images a step, {result['precision']}")
    yield parts.section("In each mode", _modes(modes))
    yield parts.section("Timeline of the fused step", _timeline(fused["ops"]))
    yield parts.section("Layers, with a kernel for each operation", _layers(modes["staged"]["layers"]))
    yield parts.section("Operations of the fused step", _kernels(fused["ops"]))
    peak, ops = result["protocol"]["roofline"], {name: modes[name]["ops"] for name in ("staged", "fused")}
    dots = {f"{name} step": [_dot(row) for row in rows if row["share"] >= MIN_SHARE] for name, rows in ops.items()}
    note = f"The larger a point, the larger its share of the step; below {MIN_SHARE:.1%} it is left out."
    yield parts.section("Roofline", roofline.figures(dots, peak, result["precision"]) + parts.note(note))
    if batches := result["batch_sizes"]:
        yield parts.section("Over the batch size", _batches(batches))


def _modes(modes: Mapping[str, Any]) -> Markup:
    """A bar of all operations for each mode, on one scale, and a table."""
    longest = max(max(row["step"]["median_ms"], _whole(row["ops"])) for row in modes.values())
    bars = join(
        html('<dt>{}</dt><dd><div class="stack">{}</div></dd>\n', name, _op_bar(row, longest))
        for name, row in modes.items()
    )
    rows = [
        [name, *_speed(row), cells.time(row["host"]), f"{row['idle_share']:.1%}"] for name, row in modes.items()
    ]  # fmt: skip
    keys = f"{_keys()} {parts.key('host', 'outside of operations')}"
    return html('<dl class="lanes">{}</dl>\n<p class="keys">{}</p>\n{}', bars, keys, parts.table(MODES, rows))


def _op_bar(row: Mapping[str, Any], longest: float) -> Markup:
    """The operations of a step in order, and the time outside of them."""
    ops = [op for op in row["ops"] if op["time"]["median_ms"] > 0]
    rest = max(0.0, row["step"]["median_ms"] - _whole(ops))
    marks = [cells.mark(op["phase"], op["time"]["median_ms"] / longest * 100, _tooltip(op)) for op in ops]
    return join([*marks, cells.mark("host", rest / longest * 100, f"outside of operations: {cells.duration(rest)}")])


def _whole(ops: Iterable[Mapping[str, Any]]) -> float:
    """Milliseconds of all operations."""
    return sum(op["time"]["median_ms"] for op in ops)


def _timeline(ops: Sequence[Mapping[str, Any]]) -> Markup:
    """The operations one after the other, with a lane for each phase."""
    ends, whole = accumulate(op["time"]["median_ms"] for op in ops), _whole(ops)
    lanes: dict[str, list[Markup]] = {}
    for op, end in zip(ops, ends, strict=True):
        ms = op["time"]["median_ms"]
        wide = ms / whole * 100
        where = f"left:{(end - ms) / whole * 100:.2f}%;width:{wide:.2f}%"
        name = html("<b>{}</b>{}", op["scope"] or op["op"], op["op"]) if wide >= NAMED else ""
        kind = "narrow" if wide < NAMED_ON_PHONES else ""
        drawn = html('<i class="{}" style="{}" title="{}">{}</i>', kind, where, _tooltip(op), name)
        lanes.setdefault(op["phase"], []).append(drawn)
    drawn = join(html('<dt>{}</dt><dd class="lane {}">{}</dd>\n', x, x, join(lanes[x])) for x in PHASES if x in lanes)
    ticks = join(html("<span>{}</span>", cells.duration(whole * i / 4) if i else 0) for i in range(5))
    note = "Operations in the order in which they first run, each as long as its median; repeated calls are one."
    return html('<dl class="lanes">{}<dt></dt><dd class="scale">{}</dd></dl>\n{}', drawn, ticks, parts.note(note))


def _layers(layers: Sequence[Mapping[str, Any]]) -> Markup:
    times = [{phase: row[phase]["median_ms"] if row[phase] else 0.0 for phase in PHASES} for row in layers]
    longest = max(sum(found.values()) for found in times) or 1.0
    rows = []
    for row, found in zip(layers, times, strict=True):
        marks = join(
            cells.mark(phase, ms / longest * 100, f"{phase} {milliseconds(ms)} ms") for phase, ms in found.items()
        )
        rows.append(
            [row["layer"] or "(no layer)", html('<div class="stack">{}</div>', marks),
             milliseconds(sum(found.values())), *(cells.time(row[phase]) for phase in PHASES), *_rates(row)]
        )  # fmt: skip
    return html('<p class="keys">{}</p>\n{}', _keys(), parts.table(LAYERS, rows, "layers"))


def _kernels(ops: Sequence[Mapping[str, Any]]) -> Markup:
    longest = max(row["time"]["median_ms"] for row in ops) or 1.0
    rows = [
        [breakable(row["op"]), breakable(row["scope"]), row["phase"],
         parts.bar(row["time"]["median_ms"] / longest, cells.time(row["time"]), row["phase"]),
         f"{row['share']:.1%}", *_rates(row)]
        for row in sorted(ops, key=lambda row: -row["time"]["median_ms"])
    ]  # fmt: skip
    return html('<p class="keys">{}</p>\n{}', _keys(), parts.table(KERNELS, rows))


def _batches(batches: Mapping[str, Mapping[str, Any]]) -> Markup:
    rows = [[size, *_speed(row), _mebibytes(row["planned_bytes"])] for size, row in batches.items()]
    points = sorted((int(size), row["images_per_second"]) for size, row in batches.items())
    drawn = Markup()
    if len(points) > 1:
        line = Line("images/s", "forward", points)
        drawn = html(
            '<div class="curves">\n{}</div>\n', figure("Over the batch size", "images a step", "images/s", [line])
        )
    return drawn + parts.table(BATCHES, rows)


def _speed(row: Mapping[str, Any]) -> list[str]:
    step = row["step"]
    return [cells.time(step), cells.interval(step), f"{row['images_per_second']:,.0f}", *_rates(row)]


def _rates(row: Mapping[str, Any]) -> list[str]:
    return [cells.rate(row["gflops_per_s"]), cells.rate(row["gbytes_per_s"]), cells.share(row["of_roofline"])]


def _dot(row: Mapping[str, Any]) -> Dot:
    first, *others = row["scope"].split("+")
    name = f"{first}{'+…' if others else ''} {row['phase']}"
    radius = 2.5 + 10 * sqrt(row["share"])
    return Dot(name, _tooltip(row), row["flops"], row["bytes"], row["time"]["median_ms"], radius)


def _tooltip(row: Mapping[str, Any]) -> str:
    return f"{row['op']} of {row['scope'] or 'no layer'}, {row['phase']}: {cells.duration(row['time']['median_ms'])}"


def _keys() -> Markup:
    return join((parts.key(phase, phase) for phase in PHASES), " ")


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
