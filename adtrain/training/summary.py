"""summary.json: the run's settings, scores and times."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from adtrain import nn
from adtrain.config import records
from adtrain.config.document import Data
from adtrain.config.records import BestBy, Duration, Measured, Precision, Seed, Total
from adtrain.core import timeline
from adtrain.core.backend import backend
from adtrain.metrics import ByClass, percentiles
from adtrain.option_types import Probability, Size
from adtrain.training.costs import planned_peak, step_flops
from adtrain.training.equations import coefficients_of
from adtrain.training.experiment import Experiment, Mode
from adtrain.training.scores import ClassScore, Score
from adtrain.training.trainer import Ending, Result
from adtrain.version import __version__

SUMMARY = "summary.json"

MetricValues: TypeAlias = dict[str, Measured | ByClass | tuple[Measured, ...] | tuple[tuple[Total, ...], ...]]
"""Values of metrics by name, in a record."""


@dataclass(frozen=True)
class OperationTime:
    """All runs of one primitive in one scope and phase; counts and sums are of one step.

    `ms` is the median over steps, `share` its part of the sum over all operations. FLOPs and bytes are the primitive's
    `cost`. Rates are None where the clock saw no time pass.
    """

    op: str
    scope: str
    phase: str
    calls: Total
    ms: Duration
    share: Duration
    flops: Duration
    bytes: Duration
    gflops_per_s: Duration | None
    gbytes_per_s: Duration | None


@dataclass(frozen=True)
class StepTimes:
    """Percentiles of the times of all steps, in milliseconds."""

    median: Duration
    p20: Duration
    p80: Duration


@dataclass(frozen=True)
class Memory:
    """The planned peak for full batches, and the memory that the device has allocated, also for evaluation and
    measurements; None if unknown."""

    planned_bytes: Total | None
    held_bytes: Total | None


@dataclass(frozen=True)
class Span:
    """Time spent on an activity. `start` is in seconds since the start of the process, or of the run."""

    name: str
    start: Duration
    seconds: Duration


@dataclass(frozen=True)
class BestEpoch:
    """The best epoch by the metric `by`."""

    by: BestBy
    value: Measured | None
    epoch: Total


MAJORITY = 0.5
"""A class with more than this share of the examples has most of them."""


@dataclass(frozen=True)
class Summary:
    """The content of summary.json. Times cover the training since the start or the resumption.

    Attributes:
        train_seconds: those of the steps by wall clock, with the upload of their indices and the reading of their
            metrics; without compilation, evaluation, the copy and check of the state, and files.
        images_per_second: images trained on, divided by `train_seconds`.
        total_seconds: from the start of the process, or of the run where the process has several, to its end.
        metrics: those of `training.metrics`, by name.
        majority_accuracy: the accuracy on the test set if its most frequent class is always predicted; None for other
            tasks than a classification.
        step_ms: None if no step was taken since the resumption.
        spans: the parts of `total_seconds`, one for each activity.
        ops, ops_sum_ms: of a profile, with times per step; empty or None if nothing was profiled.
        flops_per_second: those of a step, as it was compiled, by the mean time of a step; of this rank.
        peak_flops_per_second: the device's measured rate of products in this precision; None if it was not measured.
        profiled_step_ms: the time of a whole step while it was profiled, without the timing of its operations.
        coefficients: those of equations that were trained, by name; None without them.
        ops_to_step_ratio: `ops_sum_ms` over the mean time of a step of the training, or of the profile if no step was
            taken since the resumption.
    """

    config: dict[str, Any]
    device: str
    device_name: str
    precision: Precision
    seed: Seed
    parameters: Total
    ended: Ending
    best: BestEpoch
    model_epoch: Total
    epochs: Total
    steps: Total
    batch_size: Size
    train_seconds: Duration
    total_seconds: Duration
    spans: tuple[Span, ...]
    images_per_second: Duration | None
    step_ms: StepTimes | None
    memory: Memory
    train: Score
    validation: Score | None
    test: Score
    metrics: MetricValues
    ops: tuple[OperationTime, ...]
    ops_sum_ms: Duration | None
    ops_to_step_ratio: Duration | None
    versions: dict[str, str]
    profiled_step_ms: Duration | None = None
    majority_accuracy: Probability | None = None
    flops_per_second: Duration | None = None
    peak_flops_per_second: Duration | None = None
    coefficients: dict[str, Measured] | None = None

    @property
    def baseline(self) -> float | None:
        """`majority_accuracy`, if the class has most of the examples: then it is shown beside the accuracy."""
        found = self.majority_accuracy
        return found if found is not None and found > MAJORITY else None

    @property
    def peak_share(self) -> float | None:
        """The share of the device's peak rate; None if one of the rates is unknown."""
        rate, peak = self.flops_per_second, self.peak_flops_per_second
        return rate / peak if rate and peak else None


def speed_text(data: Data, images_per_second: float) -> str:
    """A speed as text: images, rows, or of a text characters, bytes or tokens a second."""
    number, unit = speed_of(data, images_per_second)
    return f"{number:,.0f} {unit}/s"


def speed_of(data: Data, images_per_second: float) -> tuple[float, str]:
    """A speed and its unit: images, rows, or characters, bytes or tokens of a text."""
    if not data.is_text:
        return images_per_second, data.examples
    return images_per_second * data.options.length, f"{data.options.unit}s"


def read_summary(run: Path) -> Summary | None:
    """The summary of the run in a folder; None if the run is not finished.

    Raises AdtrainError where the file cannot be read, or a value in it is missing or wrong.
    """
    path = run / SUMMARY
    if not path.exists():
        return None
    return records.read(Summary, path)


def model_text(summary: Summary) -> str | None:
    """Which epoch's weights the model has; None where there is no choice: no validation images, and the last epoch."""
    best, epoch = summary.best, summary.model_epoch
    if summary.validation is None and epoch == summary.epochs:
        return None
    if epoch == best.epoch:
        return f"of epoch {epoch} of {summary.epochs}, the best by {best.by}"
    return f"of epoch {epoch}, the last; the best by {best.by} is epoch {best.epoch}"


LEAST_RATIO, GREATEST_RATIO = 0.8, 1.25
"""Times whose ratio is within these bounds are taken as equal."""


def operations_text(summary: Summary) -> str:
    """The sum of the operations beside the step that ran. If they differ much, also what is known about the reason."""
    total, ratio, profiled = summary.ops_sum_ms, summary.ops_to_step_ratio, summary.profiled_step_ms
    if not total or not ratio:
        return ""
    step = total / ratio
    text = f"sum {total:.3f} ms, {ratio:.1%} of a step of {step:.3f} ms"
    if LEAST_RATIO <= ratio <= GREATEST_RATIO or not profiled:
        return text
    reasons = []
    if total < LEAST_RATIO * profiled:
        reasons.append(
            f"{profiled - total:.3f} ms of a profiled step pass between its operations: launches, and work of the host"
        )
    if total > GREATEST_RATIO * profiled:
        reasons.append(
            f"a profiled step takes {profiled:.3f} ms as a whole, because its operations overlap, or wait for one "
            "another only when they are timed"
        )
    if not LEAST_RATIO <= step / profiled <= GREATEST_RATIO:
        reasons.append(
            f"the profiled steps took {profiled:.3f} ms each: during the training other programs, the reading of data, "
            "or smaller last batches changed the time of a step"
        )
    return "; ".join([text, *reasons])


def summarize(
    experiment: Experiment,
    result: Result,
    device: str,
    spans: Sequence[timeline.Span] | None = None,
    ops: Sequence[OperationTime] = (),
    ops_sum_ms: float | None = None,
    profiled_step_ms: float | None = None,
    peak: float | None = None,
) -> Summary:
    """The summary of a run that ends here. `spans` are by default those of the current timeline. `peak` is the device's
    most FLOP a second, if it is known."""
    cfg, steps = experiment.config, result.step_seconds
    flops, speed = step_flops(experiment), result.images / result.train_seconds if result.images else None
    mean_ms = 1e3 * sum(steps) / len(steps) if steps else profiled_step_ms
    settings = cfg.model_dump(mode="json", exclude_none=True)
    shown = tuple(Span(*span) for span in (timeline.current().spans() if spans is None else spans))
    return Summary(
        config=settings,
        device=device,
        device_name=backend(device).device_name(),
        precision=cfg.training.precision,
        seed=cfg.training.seed,
        parameters=nn.count_parameters(result.state.params),
        ended=result.ended,
        best=BestEpoch(result.best.by, result.best.value, result.best.epoch),
        model_epoch=result.best.epoch if result.restored else result.epochs,
        epochs=result.epochs,
        steps=result.steps,
        batch_size=experiment.full_batch,
        train_seconds=result.train_seconds,
        total_seconds=sum(span.seconds for span in shown),
        spans=shown,
        images_per_second=speed,
        step_ms=_step_ms(steps),
        memory=Memory(
            planned_bytes=None if experiment.mode is Mode.EAGER else planned_peak(experiment, device),
            held_bytes=backend(device).allocated(),
        ),
        train=result.train,
        validation=result.validation,
        test=result.test,
        metrics=cast(Any, result.metrics),
        ops=tuple(ops),
        ops_sum_ms=ops_sum_ms,
        ops_to_step_ratio=ops_sum_ms / mean_ms if ops_sum_ms and mean_ms else None,
        versions={"adtrain": __version__, "python": platform.python_version(), "numpy": np.__version__},
        profiled_step_ms=profiled_step_ms,
        majority_accuracy=_majority_accuracy(experiment),
        flops_per_second=flops * speed / experiment.full_batch if flops and speed else None,
        peak_flops_per_second=peak,
        coefficients=coefficients_of(result.state.params) or None,
    )


def _majority_accuracy(experiment: Experiment) -> float | None:
    if experiment.network.task.score_kind is not ClassScore or not len(experiment.test):
        return None
    counts = np.bincount(np.asarray(experiment.test.labels))
    return float(counts.max() / counts.sum())


def _step_ms(seconds: Sequence[float]) -> StepTimes | None:
    if not seconds:
        return None
    p20, median, p80 = percentiles([1e3 * x for x in seconds], [20, 50, 80])
    return StepTimes(median, p20, p80)
