"""What `adtrain train` prints: the plan of a training, its result, and with `--plot` the curve of the loss."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

from adtrain import training
from adtrain.bench.timing import roofline
from adtrain.config import Config
from adtrain.config.document import Data
from adtrain.core.backend import backend
from adtrain.table import PERCENT, TEXT, CellFormat, Column, render
from adtrain.text import counted, mebibytes, short
from adtrain.training import Experiment, RunFolder, scores
from adtrain.training.costs import too_large
from adtrain.training.progress import Epoch, Interval, Line, Validated
from adtrain.training.summary import OperationTime, Summary, model_text, operations_text, speed_text

CALLS, MS, RATE = CellFormat("{:g}".format), CellFormat("{:.3f}".format), CellFormat("{:.1f}".format)
COLUMNS: tuple[Column[OperationTime], ...] = (
    Column("op", lambda row: row.op, TEXT),
    Column("scope", lambda row: row.scope, TEXT),
    Column("phase", lambda row: row.phase, TEXT, rank=1),
    Column("calls", lambda row: row.calls, CALLS, rank=2),
    Column("ms", lambda row: row.ms, MS),
    Column("share", lambda row: row.share, PERCENT),
    Column("GFLOP/s", lambda row: row.gflops_per_s or None, RATE, rank=3),
    Column("GB/s", lambda row: row.gbytes_per_s or None, RATE, rank=4),
)
Points: TypeAlias = Sequence[tuple[int, float]]
"""Pairs of a step and a loss."""

HEIGHT = 12
"""Lines of the curve."""
MARKS = {"training": ".", "validation": "o"}
MAX_ROWS = 15
LEAST_SECONDS = 0.05


def plan_of(experiment: Experiment, device: str, path: Path | None) -> dict[str, Any]:
    """The plan of a training into the folder `path`, or runs/NAME, as JSON values. Nothing is written.

    `seconds_at_peak` is the time of the FLOPs of all steps at the device's measured peak rate; None if that rate was
    not measured. A training takes longer, unless its kernels need fewer FLOPs (Winograd convolutions, 2:4 sparsity).

    Raises:
        AdtrainError: the folder cannot be made, or the step does not fit on the device.
    """
    folder = RunFolder.planned(experiment, path)
    if (error := too_large(experiment, device)) is not None:
        raise error
    costs, cfg = training.step_costs(experiment, device), experiment.config
    validation = 0 if experiment.validation is None else len(experiment.validation)
    flops, rate = costs.fused.flops, peak_of(cfg, device)
    return {
        "name": cfg.name,
        "folder": str(folder),
        "device": device,
        "device_name": backend(device).device_name(),
        "data": {"train": len(experiment.train), "validation": validation, "test": len(experiment.test)},
        "parameters": sum(row.parameters for row in costs.layers),
        "precision": cfg.training.precision,
        "epochs": experiment.epochs,
        "steps": experiment.total_steps,
        "batch_size": experiment.full_batch,
        "step_flops": flops,
        "step_bytes": costs.fused.bytes,
        "planned_bytes": costs.memory.peak,
        "seconds_at_peak": None if rate is None else flops * experiment.total_steps / rate,
    }


def peak_of(cfg: Config, device: str) -> float | None:
    """The device's measured FLOP a second of products in the precision of the config; None if it was not measured."""
    peak = roofline.known(device)
    if peak is None:
        return None
    return 1e9 * peak.gflops_per_s.get(cfg.training.precision, peak.gflops_per_s["float32"])


def plan_lines(plan: dict[str, Any], examples: str) -> list[str]:
    """The plan as lines of text; `examples` says what the data consist of."""
    data, steps, seconds = plan["data"], plan["steps"], plan["seconds_at_peak"]
    held_out = f"{data['validation']:,} validation, " if data["validation"] else ""
    time = (
        "unknown; adtrain devices --measure measures the rates that predict it"
        if seconds is None
        else f"at least {f'{seconds:,.1f}' if seconds >= 1 else f'{seconds:.1g}'} s, at the device's peak FLOP rate"
    )
    return [
        f"data    {data['train']:,} training, {held_out}{counted(data['test'], f'test {examples}')}",
        f"model   {plan['parameters']:,} parameters, {plan['precision']}",
        f"device  {plan['device']}, {plan['device_name']}",
        f"steps   {steps:,} of {counted(plan['batch_size'], examples)}; epochs: {plan['epochs']}",
        f"work    {short(plan['step_flops'])}FLOP and {short(plan['step_bytes'], 'B')} a step",
        f"memory  {mebibytes(plan['planned_bytes'])} planned peak",
        f"time    {time}",
        f"folder  {plan['folder']}",
    ]


def result_lines(summary: Summary, tested: int, data: Data, verbose: bool = False) -> list[str]:
    """The lines of the result, the scores last. `tested` examples of the `data` were tested."""
    best = summary.best
    examples, speed = data.examples, ""
    if summary.images_per_second is not None:
        share = "" if summary.peak_share is None else f", {summary.peak_share:.0%} of peak"
        speed = f" ({speed_text(data, summary.images_per_second)}{share})"
    lines = [
        f"model   {summary.parameters:,} parameters, {summary.precision}",
        f"device  {summary.device}, {summary.device_name}",
        *(_details(summary, examples) if verbose else ()),
        f"time    {summary.total_seconds:.1f} s in all, {summary.train_seconds:.1f} s training{speed}",
    ]
    if summary.ended == "early_stopping":
        lines.append(f"ended   early, after epoch {summary.epochs}: {best.by} was best in epoch {best.epoch}")
    if summary.ended == "line_search":
        lines.append(
            f"ended   after {summary.steps:,} steps: the line search finds no lower loss in {summary.precision}; "
            "the weights are those with the lowest"
        )
    if (chosen := model_text(summary)) is not None:
        lines.append(f"weights {chosen}")
    if summary.coefficients is not None:
        lines.append(f"learnt  {', '.join(f'{name} {value:.6g}' for name, value in summary.coefficients.items())}")
    lines += scores.metric_lines(summary.metrics)
    if summary.baseline is not None:
        lines.append(f"base    accuracy {summary.baseline:.2%}, of the most frequent class")
    return [*lines, f"test    {scores.text(summary.test)} of {counted(tested, examples)}"]


def _details(summary: Summary, examples: str) -> list[str]:
    """The lines about steps, memory, and the activities that took at least a twentieth of a second, longest first."""
    lines = [f"steps   {summary.steps:,} of {counted(summary.batch_size, examples)}"]
    if (step := summary.step_ms) is not None:
        lines.append(f"step    median {step.median:.2f} ms, p20 {step.p20:.2f}, p80 {step.p80:.2f}")
    memory = summary.memory
    if memory.planned_bytes is not None:
        held = "" if memory.held_bytes is None else f", {mebibytes(memory.held_bytes)} allocated"
        lines.append(f"memory  {mebibytes(memory.planned_bytes)} planned peak{held}")
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in summary.spans:
        seconds[span.name] += span.seconds
    others = sorted((-time, name) for name, time in seconds.items() if name != "training" and time >= LEAST_SECONDS)
    if others:
        lines.append(f"other   {', '.join(f'{name} {-time:.2f} s' for time, name in others)}")
    return lines


def operation_lines(summary: Summary, width: int, max_rows: int | None = MAX_ROWS) -> list[str]:
    """The table of a step's operations, slowest first, the first `max_rows` of them, and their sum."""
    rows = sorted(summary.ops, key=lambda row: -row.ms)
    top, rest = rows[:max_rows], rows[len(rows) if max_rows is None else max_rows :]
    if rest:
        calls, ms, share = (sum(getattr(row, field) for row in rest) for field in ("calls", "ms", "share"))
        top.append(OperationTime(f"{len(rest)} more rows", "", "", calls, ms, share, 0, 0, None, None))
    return [
        "operations of one step, by time",
        *render(COLUMNS, top, width),
        *textwrap.wrap(operations_text(summary), width),
    ]


def losses(lines: Sequence[Line]) -> dict[str, Points]:
    """The losses by part of the data, from the lines of metrics.jsonl. Those of the training are of intervals."""
    found = defaultdict[str, list[tuple[int, float]]](list)
    for x in lines:
        if isinstance(x, Interval):
            found["training"].append((x.step, x.train.loss))
        elif isinstance(x, Epoch | Validated) and x.validation is not None:
            found["validation"].append((x.step, x.validation.loss))
    return {name: found[name] for name in MARKS if found[name]}


def plot_lines(curves: Mapping[str, Points], width: int) -> list[str]:
    """The lines of a picture of curves. A column shows the mean of the losses at its steps."""
    curves = {name: [(step, y) for step, y in points if isfinite(y)] for name, points in curves.items()}
    points = [point for found in curves.values() for point in found]
    if not points:
        return []
    last, low, high = max(step for step, _ in points), min(y for _, y in points), max(y for _, y in points)
    labels = {0: f"{high:.4g}", HEIGHT - 1: f"{low:.4g}"}
    margin = max(map(len, labels.values()))
    columns = max(width - margin - 2, 1)
    rows = [[" "] * columns for _ in range(HEIGHT)]
    for name, found in curves.items():
        by_column = defaultdict[int, list[float]](list)
        for step, y in found:
            by_column[min(step * columns // (last + 1), columns - 1)].append(y)
        for column, ys in by_column.items():
            height = (sum(ys) / len(ys) - low) / (high - low or 1.0)
            rows[round((1 - height) * (HEIGHT - 1))][column] = MARKS[name]
    shown = [f"{labels.get(i, ''):>{margin}} |{''.join(row).rstrip()}" for i, row in enumerate(rows)]
    axis = f"{' ' * margin} +{'-' * columns}"
    end = f"{last:,} steps"
    legend = ", ".join(f"{MARKS[name]} {name}" for name, found in curves.items() if found)
    return ["loss", *shown, axis, f"{legend}{end:>{max(width - len(legend), len(end) + 1)}}"]
