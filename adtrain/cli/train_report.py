"""The report that `adtrain train` prints at its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from adtrain.table import Column, render
from adtrain.text import counted
from adtrain.training import scores
from adtrain.training.summary import OperationTime, Summary, model_text

COLUMNS = (
    Column("op", text=True),
    Column("scope", text=True),
    Column("phase", rank=1, text=True),
    Column("calls", rank=2),
    Column("ms"),
    Column("share"),
    Column("GFLOP/s", rank=3),
    Column("GB/s", rank=4),
)
MAX_ROWS = 15
LEAST_SECONDS = 0.05


def report(
    summary: Summary, test_images: int, width: int, max_rows: int | None = MAX_ROWS, examples: str = "images"
) -> list[str]:
    """The lines of the report: scores, times, and a step's operations, slowest first, the first `max_rows` of them.

    `examples` says what the data consist of.
    """
    test, step, best = summary.test, summary.step_ms, summary.best
    speed = "" if step is None else f" ({summary.images_per_second:,.0f} {examples}/s)"
    lines = [
        f"test    {scores.text(test)} of {counted(test_images, examples)}",
        *scores.metric_lines(summary.metrics),
        f"model   {summary.parameters:,} parameters, {summary.precision}",
        f"device  {summary.device}, {summary.device_name}",
        f"time    {summary.total_seconds:.1f} s in all, {summary.train_seconds:.1f} s training{speed}",
        *_before_and_after(summary),
        f"steps   {summary.steps:,} of {counted(summary.batch_size, examples)}",
    ]
    if step is not None:
        lines.append(f"step    median {step.median:.2f} ms, p20 {step.p20:.2f}, p80 {step.p80:.2f}")
    if summary.ended == "early_stopping":
        lines.append(f"ended   early, after epoch {summary.epochs}: {best.by} was best in epoch {best.epoch}")
    if (chosen := model_text(summary)) is not None:
        lines.append(f"weights {chosen}")
    memory = summary.memory
    if memory.planned_bytes is not None:
        held = "" if memory.held_bytes is None else f", {memory.held_bytes / 2**20:,.1f} MiB allocated"
        lines.append(f"memory  {memory.planned_bytes / 2**20:,.1f} MiB planned peak{held}")
    if summary.ops:
        lines += ["", "operations of one step, by time", *_operations(summary.ops, width, max_rows), _sum_line(summary)]
    return lines


def _before_and_after(summary: Summary) -> list[str]:
    """A line with the activities besides the training that took at least a twentieth of a second, longest first."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in summary.spans:
        seconds[span.name] += span.seconds
    others = sorted((-time, name) for name, time in seconds.items() if name != "training" and time >= LEAST_SECONDS)
    found = [f"{name} {-time:.2f} s" for time, name in others]
    return [f"        {', '.join(found)}"] if found else []


def _operations(rows: Sequence[OperationTime], width: int, max_rows: int | None) -> list[str]:
    rows = sorted(rows, key=lambda row: -row.ms)
    top, rest = rows[:max_rows], rows[len(rows) if max_rows is None else max_rows :]
    cells = [
        [
            row.op,
            row.scope,
            row.phase,
            f"{row.calls:g}",
            f"{row.ms:.3f}",
            f"{row.share:.1%}",
            _rate(row.gflops_per_s),
            _rate(row.gbytes_per_s),
        ]
        for row in top
    ]
    if rest:
        calls, ms, share = (sum(getattr(row, field) for row in rest) for field in ("calls", "ms", "share"))
        cells.append([f"{len(rest)} more rows", "", "", f"{calls:g}", f"{ms:.3f}", f"{share:.1%}", "", ""])
    return render(COLUMNS, cells, width)


def _sum_line(summary: Summary) -> str:
    operations, ratio = summary.ops_sum_ms, summary.ops_to_step_ratio
    assert operations is not None
    assert ratio is not None
    return f"sum {operations:.3f} ms, {ratio:.1%} of the mean step of {operations / ratio:.3f} ms"


def _rate(value: float | None) -> str:
    return "" if not value else f"{value:.1f}"
