"""The text of a config's training step: its layers, its kernels, and the step in each mode and batch size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from adtrain.bench.step import PHASES
from adtrain.bench.text.cells import (
    INTERVAL,
    KERNELS,
    RATES,
    cache_note,
    kernel_cells,
    noise,
    protocol,
    range_cell,
    rate_cells,
    time_cell,
    wrapped,
)
from adtrain.bench.timing.records import milliseconds
from adtrain.table import Column, render

LAYERS = (
    Column("layer", text=True),
    *(Column(f"{phase} ms", rank=1 if phase == "update" else 0) for phase in PHASES),
    Column("share", rank=2),
    *RATES,
)
KERNEL_TABLE = (
    Column("fused operation", text=True),
    Column("layers", text=True),
    Column("phase", rank=7, text=True),
    Column("ms"),
    Column("share", rank=1),
    *RATES,
    *KERNELS,
)
STEPS = (
    Column("step", text=True),
    Column("ms"),
    INTERVAL,
    Column("examples/s"),
    *RATES,
    Column("host ms", rank=2),
    Column("idle", rank=2),
    Column("parts ms", rank=6),
    Column("parts"),
)
BATCHES = (
    Column("batch"),
    Column("ms"),
    INTERVAL,
    Column("examples/s"),
    *RATES,
    Column("memory planned", rank=2),
)


def lines(result: Mapping[str, Any], width: int) -> Iterator[str]:
    modes = result["modes"]
    yield from protocol(result, width)
    what = f"{result['config']}, {result['precision']}, {result['batch_size']} examples a step"
    tables = "layers with a kernel for each operation, then the operations of the fused step, then whole steps"
    yield from wrapped([f"{what}; {tables}"], width)
    yield ""
    layers = modes["staged"]["layers"]
    cells = [
        [row["layer"] or "(no layer)", *(time_cell(row[phase]) for phase in PHASES), f"{row['share']:.1%}",
         *rate_cells(row)]
        for row in layers
    ]  # fmt: skip
    sums = [sum(row[phase]["median_ms"] for row in layers if row[phase]) for phase in PHASES]
    cells.append(["sum", *map(milliseconds, sums), "100.0%", "", "", ""])
    yield from render(LAYERS, cells, width)
    yield ""
    cells = [
        [row["op"], row["scope"], row["phase"], time_cell(row["time"]), f"{row['share']:.1%}", *rate_cells(row),
         *kernel_cells(row["kernels"])]
        for row in modes["fused"]["ops"]
    ]  # fmt: skip
    yield from render(KERNEL_TABLE, cells, width)
    yield ""
    cells = [
        [name, *step_cells(row), time_cell(row["host"]), f"{row['idle_share']:.1%}", time_cell(row["parts"]),
         f"{row['parts_to_step']:.1%}"]
        for name, row in modes.items()
    ]  # fmt: skip
    yield from render(STEPS, cells, width)
    memory = result["memory"]
    measured = "" if memory["held_bytes"] is None else f", {mebibytes(memory['held_bytes'])} measured"
    yield f"memory of the fused step: {mebibytes(memory['planned_bytes'])} planned{measured}"
    if result["batch_sizes"]:
        yield ""
        cells = [[n, *step_cells(row), mebibytes(row["planned_bytes"])] for n, row in result["batch_sizes"].items()]
        yield from render(BATCHES, cells, width)
    shown = (*layers, *modes["fused"]["ops"], *modes.values(), *result["batch_sizes"].values())
    yield from cache_note(shown, width)
    yield from noise(result, width)


def step_cells(row: Mapping[str, Any]) -> list[str]:
    """A step's time, interval and rates."""
    return [time_cell(row["step"]), range_cell(row["step"]), f"{row['images_per_second']:,.0f}", *rate_cells(row)]


def mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
