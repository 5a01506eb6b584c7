"""`adtrain bench CONFIG`: the layers of a config's step, and the step in each way that it can run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import click

from adtrain import config, training
from adtrain.bench.steps.memory import held_bytes
from adtrain.bench.steps.modes import PHASES, SAMPLE_MS, ModeBench, bench_batches, bench_modes, record
from adtrain.bench.steps.trace import trace_step
from adtrain.bench.timing import protocol as about
from adtrain.bench.timing.records import milliseconds
from adtrain.cli.bench_report import (
    INTERVAL,
    KERNELS,
    RATES,
    kernel_cells,
    known_roofline,
    noise,
    protocol,
    range_cell,
    rate_cells,
    time_cell,
    wrapped,
)
from adtrain.cli.options import progress
from adtrain.cli.table import Column, render, terminal_width
from adtrain.files import write_atomic
from adtrain.training import Experiment, Mode
from adtrain.training.memory import planned_peak

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
    Column("images/s"),
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
    Column("images/s"),
    *RATES,
    Column("memory planned", rank=2),
)


def run(
    path: str, overrides: Sequence[str], device: str, batch_sizes: Sequence[int], trace_file: str | None
) -> tuple[dict[str, Any], list[str]]:
    """The result, and the lines that show it; the trace is written to its file."""
    experiment, *others = prepared(path, overrides, device, batch_sizes)
    # Before anything else has taken memory.
    memory = {"planned_bytes": planned_peak(experiment, device), "held_bytes": held_bytes(experiment, device)}
    peak, precision = known_roofline(device), experiment.config.training.precision
    conditions = about.protocol(device, peak, SAMPLE_MS)
    progress(f"bench: timing steps of {experiment.config.name} in each mode, some seconds")
    modes = bench_modes(experiment, device)
    result = {
        "kind": "config",
        "protocol": conditions,
        "config": experiment.config.name,
        "precision": precision,
        "batch_size": experiment.full_batch,
        "memory": memory,
        "modes": {name: record(mode, peak, precision) for name, mode in modes.items()},
        "batch_sizes": bench_batches({e.full_batch: e for e in others}, peak, device) if others else {},
    }
    if trace_file is not None:
        trace = {"traceEvents": traced(experiment, modes, device), "otherData": result["protocol"]}
        write_atomic(trace_file, json.dumps(trace, allow_nan=False).encode() + b"\n")
    return result, list(report(result))


def prepared(path: str, overrides: Sequence[str], device: str, batch_sizes: Sequence[int]) -> list[Experiment]:
    """The config's experiment, and one for each batch size.

    Raises:
        UsageError: there are fewer images than a batch.
    """
    given = [config.load(path, [*overrides, *more]) for more in ([], *([f"data.batch_size={n}"] for n in batch_sizes))]
    training.check_precision(given[0], device)
    first = training.prepare(given[0])
    for n in batch_sizes:
        if n > len(first.train):
            raise click.UsageError(f"--batch-sizes {n}: there are {len(first.train):,} images to train on")
    return [first, *map(training.prepare, given[1:])]


def traced(experiment: Experiment, modes: Mapping[str, ModeBench], device: str) -> list[dict[str, Any]]:
    """The events of one step in each mode."""
    events = []
    for pid, (name, mode) in enumerate(modes.items(), 1):
        alike = replace(experiment, mode=Mode(name))
        take = training.continuation(alike, alike.initial_state(device), device)
        take(1)
        kernels = {key: [kernel.name for kernel in found] for key, found in mode.kernels.items()}
        events += trace_step(pid, name, take, kernels, device)
    return events


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """The layers with a kernel an operation, what the fused step runs, the step in each mode, and by batch size."""
    width, modes = terminal_width(), result["modes"]
    yield from protocol(result)
    what = f"{result['config']}, {result['precision']}, {result['batch_size']} images a step"
    yield from wrapped([f"{what}; layers with a kernel an operation, then what the fused step runs, then whole steps"])
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
    held = "" if memory["held_bytes"] is None else f", {mebibytes(memory['held_bytes'])} held"
    yield f"memory of the fused step: {mebibytes(memory['planned_bytes'])} planned{held}"
    if result["batch_sizes"]:
        yield ""
        cells = [[n, *step_cells(row), mebibytes(row["planned_bytes"])] for n, row in result["batch_sizes"].items()]
        yield from render(BATCHES, cells, width)
    yield from noise(result)


def step_cells(row: Mapping[str, Any]) -> list[str]:
    """A step's time and speed."""
    return [time_cell(row["step"]), range_cell(row["step"]), f"{row['images_per_second']:,.0f}", *rate_cells(row)]


def mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
