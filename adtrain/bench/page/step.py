"""The page of a config's training step: its modes, timeline, layers and kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import sqrt
from typing import Any

from markupsafe import Markup

from adtrain.bench.page import blocks, cells, roofline
from adtrain.bench.page.curves import Line, figure
from adtrain.bench.page.roofline import Dot
from adtrain.bench.timing.records import milliseconds
from adtrain.report import parts

PHASES = ("forward", "backward", "update")
MIN_SHARE = 0.005
"""Share of the step below which an operation is not drawn in the roofline."""

MIN_NAMED_SHARE = 0.03

NAMED, NAMED_ON_PHONES = 4, 15
"""Percent of the timeline that an operation must take to be named in it."""

RATES = {"GFLOP/s": "minor", "GB/s": "minor", "of peak": "minor"}
MODES = {"step": "left", "ms": "", "95% interval": "minor", "examples/s": "", **RATES, "host ms": "minor", "idle": ""}
LAYERS = {"layer": "text", "forward, backward, update": "left", "ms": "", **dict.fromkeys(PHASES, "minor"), **RATES}
KERNELS = {"fused operation": "text", "layers": "text", "phase": "left minor", "ms": "", "share": "", **RATES}
BATCHES = {"batch": "", "ms": "", "95% interval": "minor", "examples/s": "", **RATES, "memory planned": ""}


def title(result: Mapping[str, Any]) -> str:
    return f"{result['config']}: a training step"


def body(result: Mapping[str, Any]) -> Iterable[Markup]:
    modes, memory, peak = result["modes"], result["memory"], result["protocol"]["roofline"]
    fused, eager = modes["fused"], modes["eager"]["step"]["median_ms"]
    time = fused["step"]
    found = [
        cells.headline("step, fused", time, cells.duration),
        cells.headline("examples/s", time, lambda ms: f"{result['batch_size'] / ms * 1e3:,.0f}", rate=True),
        cells.headline("faster than eager", time, lambda ms: f"{cells.factor(eager / ms)} x", rate=True),
        ("of peak", cells.of_peak(fused, peak)),
        ("memory planned", _mebibytes(memory["planned_bytes"])),
    ]
    if memory["held_bytes"] is not None:
        found.append(("memory measured", _mebibytes(memory["held_bytes"])))
    yield parts.tiles(found)
    yield parts.note(f"{result['batch_size']} examples a step, {result['precision']}")
    yield parts.section("In each mode", _modes(modes, peak))
    yield parts.section("Timeline of the fused step", _timeline(fused["ops"]))
    yield parts.section("Layers, with a kernel for each operation", _layers(modes["staged"]["layers"], peak))
    yield parts.section("Operations of the fused step", _kernels(fused["ops"], peak))
    yield parts.section("Roofline", _roofline(modes, peak, result["precision"]))
    if batches := result["batch_sizes"]:
        yield parts.section("Over the batch size", _batches(batches, peak))


def _modes(modes: Mapping[str, Any], peak: Mapping[str, Any]) -> Markup:
    """A bar of all operations for each mode, on one scale, and a table."""
    longest = max(max(row["step"]["median_ms"], _whole(row["ops"])) for row in modes.values())
    bars = {name: blocks.stack(_op_bars(row, longest)) for name, row in modes.items()}
    rows = [
        [name, *_speed(row, peak), cells.time(row["host"]), f"{row['idle_share']:.1%}"] for name, row in modes.items()
    ]
    keys = blocks.keys([*zip(PHASES, PHASES, strict=True), ("host", "outside of operations")])
    return blocks.rows(bars) + keys + parts.table(MODES, rows)


def _op_bars(row: Mapping[str, Any], longest: float) -> list[tuple[str, float, str]]:
    """The operations of a step in order, and the time outside of them: class, percent, tooltip."""
    ops = [op for op in row["ops"] if op["time"]["median_ms"] > 0]
    rest = max(0.0, row["step"]["median_ms"] - _whole(ops))
    bars = [(op["phase"], op["time"]["median_ms"] / longest * 100, _tooltip(op)) for op in ops]
    return [*bars, ("host", rest / longest * 100, f"outside of operations: {cells.duration(rest)}")]


def _whole(ops: Iterable[Mapping[str, Any]]) -> float:
    """Milliseconds of all operations."""
    return sum(op["time"]["median_ms"] for op in ops)


def _timeline(ops: Sequence[Mapping[str, Any]]) -> Markup:
    """The operations one after the other, with a lane for each phase."""
    ends, whole = accumulate(op["time"]["median_ms"] for op in ops), _whole(ops)
    lanes: dict[str, list[dict[str, Any]]] = {}
    for op, end in zip(ops, ends, strict=True):
        ms = op["time"]["median_ms"]
        width = ms / whole * 100
        name, details = (op["scope"] or op["op"], op["op"]) if width >= NAMED else ("", "")
        bar = {"left": (end - ms) / whole * 100, "width": width, "tooltip": _tooltip(op)}
        lanes.setdefault(op["phase"], []).append(
            {**bar, "name": name, "details": details, "wide": width >= NAMED_ON_PHONES}
        )
    ticks = [cells.duration(whole * i / 4) if i else "0" for i in range(5)]
    note = "Operations in the order in which they first run, each as long as its median; repeated calls are one."
    return blocks.timeline({phase: lanes[phase] for phase in PHASES if phase in lanes}, ticks) + parts.note(note)


def _layers(layers: Sequence[Mapping[str, Any]], peak: Mapping[str, Any]) -> Markup:
    times = [{phase: row[phase]["median_ms"] if row[phase] else 0.0 for phase in PHASES} for row in layers]
    longest = max(sum(found.values()) for found in times) or 1.0
    rows = []
    for row, found in zip(layers, times, strict=True):
        bars = [(phase, ms / longest * 100, f"{phase} {milliseconds(ms)} ms") for phase, ms in found.items()]
        rows.append(
            [row["layer"] or "(no layer)", blocks.stack(bars), milliseconds(sum(found.values())),
             *(cells.time(row[phase]) for phase in PHASES), *_rates(row, peak)]
        )  # fmt: skip
    return _keys() + parts.table(LAYERS, rows, "layers")


def _kernels(ops: Sequence[Mapping[str, Any]], peak: Mapping[str, Any]) -> Markup:
    longest = max(row["time"]["median_ms"] for row in ops) or 1.0
    rows = [
        [parts.breakable(row["op"].split("+")), parts.breakable(row["scope"].split("+")), row["phase"],
         parts.bar(row["time"]["median_ms"] / longest, cells.time(row["time"]), row["phase"]),
         f"{row['share']:.1%}", *_rates(row, peak)]
        for row in sorted(ops, key=lambda row: -row["time"]["median_ms"])
    ]  # fmt: skip
    return _keys() + parts.table(KERNELS, rows)


def _roofline(modes: Mapping[str, Any], peak: Mapping[str, Any], precision: str) -> Markup:
    """The operations of both steps, with arrows from the staged operations to the fused ones that they are part of."""
    staged, fused = (
        [(row, dot) for row in modes[mode]["ops"] if row["share"] >= MIN_SHARE and (dot := _dot(row, mode)).drawn]
        for mode in ("staged", "fused")
    )
    arrows = [
        (start, end)
        for row, start in staged
        for into, end in fused
        if row["phase"] == into["phase"] and all(row[name] in into[name].split("+") for name in ("scope", "op"))
    ]
    dots = [dot for _, dot in staged + fused]
    note = "Rings are operations of the staged step; arrows lead to the fused operations that they are part of. The "
    note += f"larger a point, the larger its share of the step; below {MIN_SHARE:.1%} it is left out."
    return roofline.figures({"staged and fused": dots}, peak, precision, arrows) + parts.note(note)


def _batches(batches: Mapping[str, Mapping[str, Any]], peak: Mapping[str, Any]) -> Markup:
    rows = [[size, *_speed(row, peak), _mebibytes(row["planned_bytes"])] for size, row in batches.items()]
    points = sorted((int(size), row["images_per_second"]) for size, row in batches.items())
    drawn = Markup()
    if len(points) > 1:
        line = Line("examples/s", "forward", points)
        drawn = blocks.figures([figure("Over the batch size", "examples a step", "examples/s", [line])])
    return drawn + parts.table(BATCHES, rows)


def _speed(row: Mapping[str, Any], peak: Mapping[str, Any]) -> list[str]:
    step = row["step"]
    return [cells.time(step), cells.interval(step), f"{row['images_per_second']:,.0f}", *_rates(row, peak)]


def _rates(row: Mapping[str, Any], peak: Mapping[str, Any]) -> list[str]:
    return [cells.rate(row["gflops_per_s"]), cells.rate(row["gbytes_per_s"]), cells.of_peak(row, peak)]


def _dot(row: Mapping[str, Any], mode: str) -> Dot:
    """The point of an operation; the larger ones of the fused step have names."""
    first, *others = row["scope"].split("+")
    named = mode == "fused" and row["share"] >= MIN_NAMED_SHARE
    name = f"{first}{'+…' if others else ''} {row['phase']}" if named else ""
    radius = 2.5 + 10 * sqrt(row["share"])
    return Dot(name, _tooltip(row), row["flops"], row["bytes"], row["time"]["median_ms"], radius, mode)


def _tooltip(row: Mapping[str, Any]) -> str:
    return f"{row['op']} of {row['scope'] or 'no layer'}, {row['phase']}: {cells.duration(row['time']['median_ms'])}"


def _keys() -> Markup:
    return blocks.keys(list(zip(PHASES, PHASES, strict=True)))


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
