"""The text of the analysis of CPU and GPU: times and speed-ups by operation and config, and where each is faster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from adtrain.backends.cpu.naive import LABEL as NAIVE
from adtrain.backends.cpu.naive import OPTIMIZATION
from adtrain.bench.devices import COPIES
from adtrain.bench.text.cells import noise, protocol, time_cell, wrapped
from adtrain.table import Column, render

MAX_SHAPES = 12
SHAPES = (Column("threads"), Column("blocks"), Column("us"), Column("GB/s"), Column("", text=True))
CANDIDATES = (Column("candidate", text=True), Column("us"), Column("", text=True))


def lines(result: Mapping[str, Any], width: int) -> Iterator[str]:
    yield from protocol(result, width)
    yield from tables(result, width)
    yield from noise(result, width)


def tables(result: Mapping[str, Any], width: int) -> Iterator[str]:
    """All tables, without the protocol."""
    yield from wrapped(
        [
            "times of a call from the host until the device has finished; x: speed-up over the CPU",
            f"{NAIVE}: products and convolutions by their definition, {OPTIMIZATION}; cpu: vector code, all cores",
            f"{COPIES}: with copies of the arguments to the device, and of the result back",
        ],
        width,
    )
    for found in result.get("operations", ()):
        yield from _table(f"{found['op']}: {found['what']}", "n", found, width)
    for found in result.get("configs", ()):
        yield from _config_lines(found, width)
    for found in result.get("growing", ()):
        yield from _table(f"{found['of']}: a step over the {found['over']}", found["over"], found, width)
    if "launch" in result:
        title = f"{result['launch']['kernel']}: launch shapes, the {MAX_SHAPES} fastest and the rule's"
        yield from ("", *wrapped([title], width))
        rows = sorted(result["launch"]["rows"], key=lambda row: float(row["time"]["median_ms"]))
        cells = [
            [str(row["threads"]), str(row["blocks"]), f"{row['time']['median_ms'] * 1e3:.2f}",
             f"{row['gbytes_per_s']:.0f}", "rule" if row["rule"] else ""]
            for i, row in enumerate(rows) if i < MAX_SHAPES or row["rule"]
        ]  # fmt: skip
        yield from render(SHAPES, cells, width)
        yield from ("", f"{result['candidates']['problem']}: candidates")
        cells = [
            [row["kernel"], f"{row['us']:.2f}", ", ".join(mark for mark in ("taken", "rule") if row[mark])]
            for row in result["candidates"]["rows"]
        ]
        yield from render(CANDIDATES, cells, width)


def _config_lines(found: Mapping[str, Any], width: int) -> Iterator[str]:
    what = ", ".join([found["config"], *found["overrides"]])
    yield from ("", *wrapped([f"{what}: a step of {found['batch_size']} examples"], width))
    columns = Column("", text=True), Column("ms"), Column("x"), Column("95% interval", text=True)
    cells = []
    for label, time in found["times"].items():
        speedup = found["speedups"].get(label)
        interval = f"{speedup['low']:.3g} to {speedup['high']:.3g}" if speedup else ""
        cells.append([label, time_cell(time), f"{speedup['median']:.3g}" if speedup else "", interval])
    yield from render(columns, cells, width)
    if "without_naive" in found:
        yield from wrapped([f"{NAIVE} skipped: {found['without_naive']}"], width)
    labels = list(found["layers"][0]["ms"])
    yield from ("", "ms of each layer, with a kernel for each operation")
    cells = [
        [row["layer"] or "(no layer)", *(f"{row['ms'][label]:.4f}" for label in labels)] for row in found["layers"]
    ]
    yield from render([Column("layer", text=True), *map(Column, labels)], cells, width)
    yield from _table(f"{found['config']}: a step over the batch size", "batch", found["batches"], width)


def _table(title: str, size: str, found: Mapping[str, Any], width: int) -> Iterator[str]:
    """A row for each size: times and speed-ups by label. Below, the sizes at which each label is faster."""
    rows = found["rows"]
    labels = list(dict.fromkeys(label for row in rows for label in row["times"]))
    faster = list(dict.fromkeys(label for row in rows for label in row["speedups"] if label != NAIVE))
    short = {label: COPIES if label.endswith(COPIES) else label for label in labels} | {NAIVE: "naive"}
    columns = [
        Column(size),
        *(Column(short[label]) for label in labels),
        *(Column(f"x {short[label]}") for label in faster),
    ]
    cells = [
        [
            f"{row[size]}",
            *(time_cell(row["times"][label]) if label in row["times"] else "" for label in labels),
            *(f"{row['speedups'][label]['median']:.3g}" for label in faster),
        ]
        for row in rows
    ]
    yield from ("", *wrapped([title], width), *render(columns, cells, width))
    for label, where in found["crossover"].items():
        yield f"{label} is faster: {where['says']}"
