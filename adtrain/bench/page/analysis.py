"""The page of the analysis of CPU and GPU: speed-ups over sizes, and the sizes at which each device is faster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from adtrain.bench.page import blocks, cells
from adtrain.bench.page.curves import Line, figure
from adtrain.bench.page.intervals import Scale
from adtrain.bench.timing.records import milliseconds
from adtrain.report import parts

KINDS = {"gpu": "series-2", "gpu+copies": "series-3"}
"""From labels to CSS classes with their colours; other labels are grey."""

TIMES = {"": "text", "ms": "", "times faster": "", "95% interval": "minor", " ": ""}
CANDIDATES = {"candidate": "text", "µs": "", "": "left"}


def title(result: Mapping[str, Any]) -> str:
    return " against ".join(result["protocol"]["devices"].values())


def body(result: Mapping[str, Any]) -> Iterable[Markup]:
    configs, operations = result.get("configs", ()), result.get("operations", ())
    yield parts.tiles(
        cells.ratio_headline(f"{found['config']}, {label}", speedup, _times_faster)
        for found in configs
        for label, speedup in found["speedups"].items()
    )
    yield parts.note(
        "Times of a call from the host until the device has finished. A speed-up above 1 is faster than the CPU; the "
        "shade around a curve is its 95% interval."
    )
    if operations:
        drawn = [_speedups(f"{found['op']}: {found['what']}", "n", found) for found in operations]
        yield parts.section("Speed-up over the size", blocks.figures(drawn) + _crossovers(operations))
    scale = Scale(speedup for found in configs for speedup in found["speedups"].values())
    for found in configs:
        yield from _config(found, scale)
    if growing := result.get("growing", ()):
        drawn = [_speedups(f"{found['of']}, over the {found['over']}", found["over"], found) for found in growing]
        yield parts.section("Over width and depth", blocks.figures(drawn))
    if "launch" in result:
        yield parts.section(f"Launch shapes: {result['launch']['kernel']}", _launches(result["launch"]["rows"]))
        yield parts.section(f"Candidates: {result['candidates']['problem']}", _candidates(result["candidates"]))


def _times_faster(speedup: float) -> str:
    return f"{cells.factor(speedup)} x faster" if speedup >= 1 else f"{cells.factor(1 / speedup)} x slower"


def _speedups(title: str, size: str, found: Mapping[str, Any]) -> Markup:
    rows = found["rows"]
    lines = []
    for label in dict.fromkeys(label for row in rows for label in row["speedups"]):
        ends = {
            end: [(row[size], row["speedups"][label][end]) for row in rows if label in row["speedups"]]
            for end in ("median", "low", "high")
        }
        crosses = found["crossover"].get(label, {"at": None})["at"]
        lines.append(Line(label, _kind(label), ends["median"], ends["low"], ends["high"], crosses))
    note = "; ".join(f"{label} is faster: {where['says']}" for label, where in found["crossover"].items())
    return figure(title, size, "times faster", lines, level=1.0, note=note)


def _kind(label: str) -> str:
    return KINDS.get(label, "series-1")


def _crossovers(operations: Sequence[Mapping[str, Any]]) -> Markup:
    """The sizes at which each label is faster than the CPU, a row for each operation."""
    labels = dict.fromkeys(label for found in operations for label in found["crossover"])
    columns = {"operation": "text", "n is": "text minor", **{f"{label} is faster": "left" for label in labels}}
    rows = [
        [found["op"], found["what"], *(found["crossover"][label]["says"] for label in labels)] for found in operations
    ]
    return parts.table(columns, rows)


def _config(found: Mapping[str, Any], scale: Scale) -> Iterable[Markup]:
    rows = []
    for label, time in found["times"].items():
        speedup = found["speedups"].get(label)
        cols = ["", "", scale.lane([])]
        if speedup:
            lane = scale.lane([(_kind(label), label, speedup)])
            cols = [cells.factor(speedup["median"]), cells.range_of(speedup), lane]
        rows.append([label, cells.time(time), *cols])
    rows.append(["", "", "", "", scale.axis()])
    about = ", ".join([f"a step of {found['batch_size']} examples", *found["overrides"]])
    skipped = f" Naive loops skipped: {found['without_naive']}." if "without_naive" in found else ""
    content = parts.table(TIMES, rows, "systems") + parts.note(f"{about}.{skipped}")
    yield parts.section(found["config"], content)
    over_batches = blocks.figures([_speedups(f"{found['config']} over the batch size", "batch", found["batches"])])
    title = f"{found['config']} by layer and over the batch size"
    yield parts.section(title, blocks.columns([_layers(found), over_batches]))


def _layers(found: Mapping[str, Any]) -> Markup:
    """Milliseconds of each layer on each device, on one scale."""
    layers = found["layers"]
    labels = list(layers[0]["ms"])
    most = max(ms for row in layers for ms in row["ms"].values()) or 1.0

    def bars(times: Mapping[str, float]) -> Iterable[str]:
        return (parts.bar(ms / most, milliseconds(ms), _kind(label)) for label, ms in times.items())

    rows = [[row["layer"] or "(no layer)", *bars(row["ms"])] for row in layers]
    columns = {"layer": "text", **{f"{label}, ms": "" for label in labels}}
    return parts.table(columns, rows) + parts.note("With a kernel for each operation.")


def _launches(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """GB/s by threads a block (across) and blocks (down); darker is faster."""
    threads, blocks_of_grid = (sorted({row[name] for row in rows if not row["rule"]}) for name in ("threads", "blocks"))
    by_shape = {(row["blocks"], row["threads"]): row["gbytes_per_s"] for row in rows}
    best = max(by_shape.values())

    def cell(shape: tuple[int, int]) -> tuple[float, str] | None:
        found = by_shape.get(shape)
        return None if found is None else (found / best, f"{found:,.0f}")

    matrix = blocks.matrix(threads, [(f"{n:,}", [cell((n, each)) for each in threads]) for n in blocks_of_grid])
    (rule,) = (row for row in rows if row["rule"])
    chosen = f"{rule['threads']} threads and {rule['blocks']:,} blocks, {rule['gbytes_per_s']:,.0f} GB/s"
    note = f"GB/s by threads a block, across, and blocks, down. The rule chooses {chosen}."
    return matrix + parts.note(note)


def _candidates(found: Mapping[str, Any]) -> Markup:
    slowest = max(row["us"] for row in found["rows"])
    rows = [
        [row["kernel"], parts.bar(row["us"] / slowest, f"{row['us']:.2f}"),
         ", ".join(mark for mark in ("taken", "rule") if row[mark])]
        for row in found["rows"]
    ]  # fmt: skip
    return parts.table(CANDIDATES, rows)
