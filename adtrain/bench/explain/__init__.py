"""Explains the speed of a training: what binds its step and each operation, and what change would help.

`measure.py` makes the `Observed` of a config; `causes.py` has the table of causes, which read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from adtrain import config, training
from adtrain.backends.cpu.threads import usable_cores
from adtrain.bench.explain.causes import CAUSES, Finding, find
from adtrain.bench.explain.explanation import ExplainedOperation, ExplainedStep, Explanation, Memory, Start
from adtrain.bench.explain.measure import Measured, evaluation_ms, nearly_fused, observe, tried
from adtrain.bench.explain.observed import Observed
from adtrain.bench.timing.machine import busy_cores, is_busy
from adtrain.bench.timing.roofline import known_or_measured
from adtrain.core.backend import backend
from adtrain.data.file_array import machine_memory
from adtrain.invocation import invocation
from adtrain.training import Mode
from adtrain.training.costs import largest_batch, planned_peak
from adtrain.training.summary import read_summary

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
    cfg = config.load(path, overrides, plugins)
    training.check_precision(cfg, device)
    for other in also:
        training.check_precision(cfg, other)
    load, cores, made = busy_cores() or 0.0, usable_cores(), invocation()

    def measure(on: str) -> tuple[Measured, Observed]:
        progress(f"explain: preparing and timing the step of {cfg.name} on the {on}")
        measured = Measured(cfg, on, mode)
        return measured, observe(path, overrides, plugins, measured, known_or_measured(on, progress), load)

    measured, observed = measure(device)
    findings = find(observed)
    if with_trials:
        findings = list(_tried(path, overrides, plugins, measured, findings, progress))
    warnings = []
    if is_busy(load, cores):
        warnings.append(f"busy machine: other work took {load:.1f} of {cores} cores, so times may be too long")
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
