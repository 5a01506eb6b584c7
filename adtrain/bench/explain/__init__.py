"""Explains the speed of a training: what binds its step and each operation, and what change would help.

`measure.py` makes the `Observed` of a config; `causes.py` has the table of causes, which read it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from adtrain import config, training
from adtrain.backends.cpu.threads import usable_cores
from adtrain.bench.explain.causes import CAUSES, Finding, find
from adtrain.bench.explain.measure import Measured, evaluation_ms, observe, tried
from adtrain.bench.explain.observed import Observed, Operation
from adtrain.bench.result import Result
from adtrain.bench.timing.machine import busy_cores, is_busy
from adtrain.bench.timing.roofline import known_or_measured
from adtrain.bench.view import (
    NAMES,
    Column,
    Gap,
    Note,
    Part,
    Table,
    View,
    duration,
    factor,
    mebibytes,
    milliseconds,
    of_peak,
)
from adtrain.core.backend import backend
from adtrain.data.file_array import machine_memory
from adtrain.table import PERCENT, TEXT, CellFormat
from adtrain.text import counted
from adtrain.training import Mode
from adtrain.training.costs import largest_batch, planned_peak
from adtrain.training.summary import read_summary

__all__ = ["CAUSES", "Explanation", "find", "result"]

SHOWN = 8
"""The operations that a terminal shows, the slowest ones."""

ACTIVITIES = 5
"""The activities of a run that a terminal shows, the longest ones."""


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
class Explanation(Result):
    """The result of `adtrain explain`.

    Attributes:
        bounds: the share of the step by what binds it.
        findings: the causes that apply, the largest predicted gain first.
        operations: all operations of the step, the slowest first.
        run_seconds: the seconds of a finished run by activity, such as "training"; empty for a config.
        evaluation_ms: the predicted time of one evaluation of the validation examples; None without them.
        warnings: what makes the times uncertain.
    """

    kind = "explain"
    config: str
    device: str
    device_name: str
    mode: str
    precision: str
    batch_size: int
    examples: int
    step_ms: float
    host_ms: float
    examples_per_second: float
    bounds: dict[str, float]
    findings: list[Finding]
    operations: list[ExplainedOperation]
    run_seconds: dict[str, float]
    start: Start
    streamed: bool
    gather_ms: float | None
    evaluation_ms: float | None
    memory: Memory
    warnings: list[str]

    def view(self) -> View:
        bounds = ", ".join(f"{name} {share:.0%}" for name, share in self.bounds.items() if share >= 0.01)
        parts: list[Part] = [
            Note(
                f"{self.config} on {self.device} ({self.device_name}), {self.precision}, {self.mode}: "
                f"{duration(self.step_ms)} a step of {self.batch_size:,} examples, "
                f"{self.examples_per_second:,.0f} examples/s"
            ),
            Note(f"bound by: {bounds}"),
            Gap(),
            *self._causes(),
            Table(OPERATIONS, self.operations[:SHOWN], list(self._hidden())),
            Gap(),
            *map(Note, self._surroundings()),
            *map(Note, self.warnings),
        ]
        return View(f"{self.config}: what the time of a step depends on", parts)

    def _causes(self) -> Iterator[Part]:
        if not self.findings:
            yield Note("no cause of slow training found")
        for i, each in enumerate(self.findings, 1):
            settings = " ".join(f"--set {shlex.quote(x)}" for x in each.overrides)
            measured = "" if each.measured_gain is None else f", measured {factor(each.measured_gain)} x"
            yield Note(f"{i}. {each.cause}: {each.evidence}")
            yield Note(f"  {each.advice}: predicted {factor(each.predicted_gain)} x{measured}")
            if settings:
                yield Note(f"  {settings}")

    def _hidden(self) -> Iterator[str]:
        if (rest := len(self.operations) - SHOWN) > 0:
            yield f"{counted(rest, 'further operations')}; --json has all"

    def _surroundings(self) -> Iterator[str]:
        if self.run_seconds:
            longest = sorted(self.run_seconds.items(), key=lambda row: -row[1])
            activities = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in longest[:ACTIVITIES])
            yield f"run: {sum(self.run_seconds.values()):.2f} s in all, of which {activities}"
        yield (
            f"start: data and network {self.start.prepare_s:.2f} s, first step with compilation "
            f"{self.start.first_step_s:.2f} s"
        )
        read = f"streamed, {duration(self.gather_ms)} to read a batch" if self.gather_ms is not None else "in memory"
        yield f"data: {counted(self.examples, 'examples')}, {read}"
        if self.evaluation_ms is not None:
            yield f"evaluation: {duration(self.evaluation_ms)} predicted for the validation examples"
        memory = self.memory
        fits = f"fits up to batch {memory.largest_batch:,}" if memory.largest_batch else "no batch fits"
        if memory.largest_batch == self.examples:
            fits = "a batch of all examples fits"
        yield f"memory: {mebibytes(memory.planned_bytes)} planned of {mebibytes(memory.limit_bytes)}; {fits}"


OPERATIONS: tuple[Column[ExplainedOperation], ...] = (
    Column("operation", lambda row: row.operation.op, NAMES),
    Column("layers", lambda row: row.operation.scope or "(no layer)", NAMES),
    Column("phase", lambda row: row.operation.phase, TEXT, rank=2),
    Column("ms", lambda row: row.operation.ms, CellFormat(milliseconds)),
    Column("share", lambda row: row.operation.share, PERCENT),
    Column("of peak", lambda row: of_peak(row.operation), rank=1),
    Column("bound by", lambda row: row.bound, TEXT),
)


def result(
    path: str,
    overrides: Sequence[str],
    plugins: Sequence[str],
    device: str,
    mode: Mode,
    with_trials: bool,
    progress: Callable[[str], object],
) -> Explanation:
    """Measure the step of a config and find causes of slow training; `with_trials`: measure proposals, too.

    Raises:
        ConfigError, DataError: the config or its data are wrong.
    """
    cfg = config.load(path, overrides, plugins)
    training.check_precision(cfg, device)
    load, cores = busy_cores() or 0.0, usable_cores()
    progress(f"explain: preparing and timing the step of {cfg.name}")
    measured = Measured(cfg, device, mode)
    peak = known_or_measured(device, progress)
    observed = observe(path, overrides, plugins, measured, peak, load)
    findings = find(observed)
    if with_trials:
        findings = list(_tried(path, overrides, plugins, measured, findings, progress))
    warnings = []
    if is_busy(load, cores):
        warnings.append(f"busy machine: other work took {load:.1f} of {cores} cores, so times may be too long")
    return _explanation(measured, observed, findings, _run_seconds(Path(path)), warnings)


def _run_seconds(run: Path) -> dict[str, float]:
    """The seconds of a run by activity; empty where the path is no finished run."""
    found: dict[str, float] = {}
    summary = read_summary(run) if run.is_dir() else None
    for span in summary.spans if summary is not None else ():
        found[span.name] = found.get(span.name, 0.0) + span.seconds
    return found


def _tried(
    path: str,
    overrides: Sequence[str],
    plugins: Sequence[str],
    measured: Measured,
    findings: Sequence[Finding],
    progress: Callable[[str], object],
) -> Iterator[Finding]:
    for each in findings:
        if each.overrides and each.of == "step":
            progress(f"explain: trying {' '.join(each.overrides)}")
        yield replace(each, measured_gain=tried(path, overrides, plugins, measured, each))


def _explanation(
    measured: Measured,
    observed: Observed,
    findings: list[Finding],
    run_seconds: dict[str, float],
    warnings: list[str],
) -> Explanation:
    experiment, device = measured.experiment, measured.device
    limit = backend(device).available() or machine_memory()
    slowest = sorted(observed.operations, key=lambda x: -x.ms)
    return Explanation(
        config=experiment.config.name,
        device=device,
        device_name=backend(device).device_name(),
        mode=observed.mode,
        precision=observed.precision,
        batch_size=observed.batch_size,
        examples=observed.examples,
        step_ms=observed.step_ms,
        host_ms=observed.host_ms,
        examples_per_second=observed.batch_size / observed.step_ms * 1e3,
        bounds=observed.bounds(),
        findings=findings,
        operations=[ExplainedOperation(operation=x, bound=observed.bound(x)) for x in slowest],
        run_seconds=run_seconds,
        start=Start(measured.prepare_s, measured.first_s),
        streamed=observed.gather_ms is not None,
        gather_ms=observed.gather_ms,
        evaluation_ms=evaluation_ms(experiment, observed.operations),
        memory=Memory(planned_peak(experiment, device), limit, largest_batch(experiment, device, limit)),
        warnings=warnings,
    )
