"""Explains the speed of a training: what binds its step and each operation, and what change would help.

`measure.py` makes the `Observed` of a config; `causes.py` has the causes, which read it. This module makes the result
and its view.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from adtrain import config, training
from adtrain.backends.cpu.threads import usable_cores
from adtrain.bench import page
from adtrain.bench.explain.causes import CAUSES, Finding, Observed, Operation, find
from adtrain.bench.explain.measure import Measured, evaluation_ms, nearly_fused, observe, tried
from adtrain.bench.machine import busy_cores, is_busy, known_or_measured
from adtrain.bench.result import Result
from adtrain.bench.view import (
    GAP,
    NAMES,
    Column,
    Note,
    Part,
    Picture,
    Section,
    Table,
    Tiles,
    View,
    duration,
    factor,
    milliseconds,
    of_peak,
)
from adtrain.config import Config
from adtrain.core.backend import backend
from adtrain.data.file_array import machine_memory
from adtrain.table import PERCENT, TEXT, CellFormat
from adtrain.text import Invocation, counted, invocation, mebibytes, short
from adtrain.training import Mode
from adtrain.training.costs import largest_batch, planned_peak
from adtrain.training.summary import read_summary

SHOWN = 8
"""The operations that a terminal shows, the slowest ones."""

ACTIVITIES = 5
"""The activities of a run that a terminal shows, the longest ones."""

LEAST_SHARE = 0.01
"""What binds a smaller share of a step is not shown."""


@dataclass(frozen=True, kw_only=True)
class ExplainedOperation:
    """An operation of the step, and what binds it."""

    operation: Operation
    bound: str


@dataclass(frozen=True)
class Start:
    """Seconds before the second step: data and network, and the first step with its compilation."""

    prepare_s: float
    first_step_s: float


@dataclass(frozen=True)
class Memory:
    """The planned memory of the step, and the largest batch whose step fits; bytes."""

    planned_bytes: int
    limit_bytes: int
    largest_batch: int


@dataclass(frozen=True, kw_only=True)
class ExplainedStep:
    """A step on a device.

    Attributes:
        host_ms: the time outside of operations.
        bounds: the share of the step by what binds it.
        operations: all operations of the step, the slowest first.
    """

    device: str
    device_name: str
    batch_size: int
    step_ms: float
    host_ms: float
    examples_per_second: float
    bounds: dict[str, float]
    operations: list[ExplainedOperation]


@dataclass(frozen=True, kw_only=True)
class Explanation(Result):
    """The result of `adtrain explain`.

    Attributes:
        date, command: when and by which command it was measured.
        step: the step on the chosen device.
        also: the same step on other devices.
        findings: the causes that apply to the first one, the largest predicted gain first.
        run_seconds: the seconds of a finished run by activity, such as "training"; empty for a config.
        evaluation_ms: the predicted time of one evaluation of the validation examples; None without them.
        nearly_fused: why fusions that nearly apply on the GPU are not used, a sentence for each.
        warnings: what makes the times uncertain.
    """

    kind = "explain"
    date: str
    command: str
    config: str
    mode: str
    precision: str
    examples: int
    step: ExplainedStep
    also: list[ExplainedStep]
    findings: list[Finding]
    run_seconds: dict[str, float]
    start: Start
    streamed: bool
    gather_ms: float | None
    evaluation_ms: float | None
    memory: Memory
    nearly_fused: list[str]
    warnings: list[str]

    @property
    def made(self) -> Invocation:
        return Invocation(self.date, self.command)

    def view(self) -> View:
        """The step, its causes with proposed changes, its operations, and what surrounds it."""
        step, about = self.step, f"{self.precision}, {self.mode}"
        parts: list[Part] = [
            Note(f"{self.config} on {step.device} ({step.device_name}), {about}: {_speed(step)}", where="text"),
            Note(f"bound by: {_bounds(step)}", where="text"),
            *(Note(f"also on {other.device}: {_speed(other)}, bound by: {_bounds(other)}", where="text")
              for other in self.also),
            GAP,
            *_causes(self.findings),
            Table(OPERATIONS, step.operations[:SHOWN], list(_hidden(step)), where="text"),
            GAP,
            *(Note(line, "page", notice=True) for line in self.warnings),
            Tiles(list(_tiles(self))),
            Section("What binds the step", [Picture(lambda: _picture([step, *self.also]))], where="page"),
            Section("What would make it faster", _proposals(self.findings), where="page"),
            Section("Operations", [Table(OPERATIONS, step.operations, where="page", kind="operations")], where="page"),
            Section("Around the step", [Note(line) for line in _surroundings(self)]),
            *(Note(line, where="text") for line in self.warnings),
        ]  # fmt: skip
        title = f"{self.config}: what the time of a step depends on"
        return View(title, parts, f"{step.device}, {step.device_name} · {about}")


def _speed(step: ExplainedStep) -> str:
    return (
        f"{duration(step.step_ms)} a step of {step.batch_size:,} examples, {step.examples_per_second:,.0f} examples/s"
    )


def _bounds(step: ExplainedStep) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in step.bounds.items() if share >= LEAST_SHARE)


def _tiles(found: Explanation) -> Iterator[tuple[str, ...]]:
    step = found.step
    yield "step", duration(step.step_ms), counted(step.batch_size, "examples")
    yield "examples/s", f"{step.examples_per_second:,.0f}"
    first, share = next(iter(step.bounds.items()))
    yield "bound most by", first, f"{share:.0%} of the step"
    if found.findings:
        yield "predicted gain", f"{factor(found.findings[0].predicted_gain)} x", found.findings[0].cause
    for other in found.also:
        ratio = step.step_ms / other.step_ms
        yield f"step on {other.device}", duration(other.step_ms), f"{factor(ratio)} x the speed of {step.device}"


def _causes(findings: Sequence[Finding]) -> Iterator[Part]:
    """The lines of a terminal."""
    if not findings:
        yield Note(NO_CAUSE, where="text")
    for i, each in enumerate(findings, 1):
        measured = "" if each.measured_gain is None else f", measured {factor(each.measured_gain)} x"
        yield Note(f"{i}. {each.cause}: {each.evidence}", where="text")
        yield Note(f"  {each.advice}: predicted {factor(each.predicted_gain)} x{measured}", where="text")
        if each.overrides:
            yield Note(f"  {_settings(each)}", where="text")


NO_CAUSE = "no cause of slow training found"


def _settings(finding: Finding) -> str:
    return " ".join(f"--set {shlex.quote(x)}" for x in finding.overrides)


def _proposals(findings: Sequence[Finding]) -> list[Part]:
    if not findings:
        return [Note(f"{NO_CAUSE[0].upper()}{NO_CAUSE[1:]}.")]
    is_measured = any(each.measured_gain is not None for each in findings)
    columns = [column for column in PROPOSALS if is_measured or column.title != MEASURED]
    return [Table(columns, findings), Note("A gain is a factor of examples a second, of the step or of the epoch.")]


def _hidden(step: ExplainedStep) -> Iterator[str]:
    if (rest := len(step.operations) - SHOWN) > 0:
        yield f"{counted(rest, 'further operations')}; --html and --json have all"


def _surroundings(found: Explanation) -> Iterator[str]:
    if found.run_seconds:
        longest = sorted(found.run_seconds.items(), key=lambda row: -row[1])
        activities = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in longest[:ACTIVITIES])
        yield f"run: {sum(found.run_seconds.values()):.2f} s in all, of which {activities}"
    yield (
        f"start: data and network {found.start.prepare_s:.2f} s, first step with compilation "
        f"{found.start.first_step_s:.2f} s"
    )
    read = f"streamed, {duration(found.gather_ms)} to read a batch" if found.gather_ms is not None else "in memory"
    yield f"data: {counted(found.examples, 'examples')}, {read}"
    if found.evaluation_ms is not None:
        yield f"evaluation: {duration(found.evaluation_ms)} predicted for the validation examples"
    memory = found.memory
    fits = f"fits up to batch {memory.largest_batch:,}" if memory.largest_batch else "no batch fits"
    if memory.largest_batch == found.examples:
        fits = "a batch of all examples fits"
    yield from found.nearly_fused
    yield f"memory: {mebibytes(memory.planned_bytes)} planned of {mebibytes(memory.limit_bytes)}; {fits}"


def _kind(bound: str) -> str:
    """The CSS class of what binds an operation."""
    return bound.replace(" ", "-")


def _picture(steps: Sequence[ExplainedStep]) -> Markup:
    """A bar for each device, each as long as the page: the operations in the order of what binds them."""
    bounds = dict.fromkeys(name for step in steps for name, share in step.bounds.items() if share >= LEAST_SHARE)
    return page.rows({f"{x.device}, {duration(x.step_ms)}": page.stack(_bars(x)) for x in steps}) + page.keys(
        [(_kind(name), _legend(name, steps)) for name in bounds]
    )


def _legend(bound: str, steps: Sequence[ExplainedStep]) -> str:
    shares = [f"{step.bounds.get(bound, 0.0):.0%}" for step in steps]
    if len(steps) > 1:
        shares = [f"{share} of {step.device}" for share, step in zip(shares, steps, strict=True)]
    return f"{bound} {', '.join(shares)}"


def _bars(step: ExplainedStep) -> list[tuple[str, float, str]]:
    """Class, percent and tooltip of each operation, and of the host."""
    order = {bound: i for i, bound in enumerate(step.bounds)}
    found = []
    for row in sorted(step.operations, key=lambda row: order[row.bound]):
        tooltip = f"{_named(row)}: {duration(row.operation.ms)}, {row.bound}"
        found.append((_kind(row.bound), 100 * row.operation.share, tooltip))
    return [*found, ("host", 100 * step.bounds["host"], f"outside of operations: {duration(step.host_ms)}")]


def _named(row: ExplainedOperation) -> str:
    return " of ".join(filter(None, (row.operation.op, row.operation.scope)))


def _evidence(row: ExplainedOperation) -> str:
    """The work of an operation, and the least time for it."""
    x = row.operation
    work = ", ".join(filter(None, (short(x.flops, "FLOPs"), short(x.bytes, "B"))))
    blocks = "" if x.blocks is None else f"; {counted(x.blocks, 'blocks')}"
    return f"{work} take at least {duration(x.least_ms)}{blocks}"


OPERATIONS: tuple[Column[ExplainedOperation], ...] = (
    Column("operation", lambda row: row.operation.op, NAMES),
    Column("layers", lambda row: row.operation.scope or "(no layer)", NAMES),
    Column("phase", lambda row: row.operation.phase, TEXT, rank=2, minor=True),
    Column("ms", lambda row: row.operation.ms, CellFormat(milliseconds),
           bar=lambda row: (row.operation.ms, _kind(row.bound))),
    Column("share", lambda row: row.operation.share, PERCENT, minor=True),
    Column("of peak", lambda row: of_peak(row.operation), rank=1, minor=True),
    Column("bound by", lambda row: row.bound, TEXT),
    Column("evidence", _evidence, TEXT, where="page", minor=True),
)  # fmt: skip

MEASURED = "measured"
PROPOSALS: tuple[Column[Finding], ...] = (
    Column("cause", lambda row: row.cause, TEXT),
    Column("evidence", lambda row: row.evidence, TEXT, minor=True),
    Column("change", lambda row: f"{row.advice}: {_settings(row)}" if row.overrides else row.advice, TEXT),
    Column("predicted", lambda row: row.predicted_gain, CellFormat(lambda x: f"{factor(x)} x")),
    Column(MEASURED, lambda row: row.measured_gain, CellFormat(lambda x: f"{factor(x)} x")),
)


__all__ = ["CAUSES", "Explanation", "find", "result"]


def result(
    path: str,
    overrides: Sequence[str],
    plugins: Sequence[str],
    device: str,
    also: Sequence[str],
    mode: Mode,
    with_trials: bool,
    progress: Callable[[str], object],
) -> Explanation:
    """Measure the step of a config and find causes of slow training.

    Args:
        also: other devices on which the step is measured, too.
        with_trials: also measure the proposed settings.

    Raises:
        ConfigError, DataError: the config or its data are wrong.
    """

    def load(more: Sequence[str]) -> Config:
        return config.load(path, [*overrides, *more], plugins)

    cfg = load(())
    training.check_precision(cfg, device)
    for other in also:
        training.check_precision(cfg, other)
    busy, cores, made = busy_cores() or 0.0, usable_cores(), invocation()

    def measure(on: str) -> tuple[Measured, Observed]:
        progress(f"explain: preparing and timing the step of {cfg.name} on the {on}")
        measured = Measured(load, on, mode)
        return measured, observe(measured, known_or_measured(on, progress), busy)

    measured, observed = measure(device)
    findings = find(observed)
    for i, each in enumerate(findings if with_trials else ()):
        if each.overrides and each.of == "step":
            progress(f"explain: trying {' '.join(each.overrides)}")
            findings[i] = replace(each, measured_gain=tried(measured, each.overrides))
    warnings = []
    if is_busy(busy, cores):
        warnings.append(f"busy machine: other work took {busy:.1f} of {cores} cores, so times may be too long")
    of_device: Any = backend(device)
    experiment, limit = measured.experiment, of_device.available() or machine_memory()
    fuses_on_gpu = device == "gpu" and experiment.mode is Mode.FUSED
    return Explanation(
        date=made.date,
        command=made.command,
        config=cfg.name,
        mode=observed.mode,
        precision=observed.precision,
        examples=observed.examples,
        step=_step(observed),
        also=[_step(measure(other)[1]) for other in also],
        findings=findings,
        run_seconds=_run_seconds(Path(path)),
        start=Start(measured.prepare_s, measured.first_s),
        streamed=observed.gather_ms is not None,
        gather_ms=observed.gather_ms,
        evaluation_ms=evaluation_ms(experiment, observed.operations),
        memory=Memory(planned_peak(experiment, device), limit, largest_batch(experiment, device, limit)),
        nearly_fused=nearly_fused(experiment, of_device.lowering.target) if fuses_on_gpu else [],
        warnings=warnings,
    )


def _step(observed: Observed) -> ExplainedStep:
    slowest = sorted(observed.operations, key=lambda x: -x.ms)
    return ExplainedStep(
        device=observed.device,
        device_name=backend(observed.device).device_name(),
        batch_size=observed.batch_size,
        step_ms=observed.step_ms,
        host_ms=observed.host_ms,
        examples_per_second=observed.batch_size / observed.step_ms * 1e3,
        bounds=observed.bounds(),
        operations=[ExplainedOperation(operation=x, bound=observed.bound(x)) for x in slowest],
    )


def _run_seconds(run: Path) -> dict[str, float]:
    """The seconds of a run by activity; empty where the path is no finished run."""
    found: dict[str, float] = {}
    summary = read_summary(run) if run.is_dir() else None
    for span in summary.spans if summary is not None else ():
        found[span.name] = found.get(span.name, 0.0) + span.seconds
    return found
