"""How far a run is: its position, the record of its best epoch, and the lines of metrics.jsonl."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeAlias

from adtrain.config import records
from adtrain.config.records import BestBy, Bool, Duration, Measured, Total
from adtrain.files import append_line, locked_by, read_file, unwritable
from adtrain.option_types import Size
from adtrain.training.scores import Score
from adtrain.training.tasks import Labels, Task


class ScoredEpoch(Protocol):
    """A record of an epoch, of a run or of a member of a sweep. `metrics` are those of the validation part."""

    @property
    def epoch(self) -> int: ...
    @property
    def train(self) -> Score | None: ...
    @property
    def validation(self) -> Score | None: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...


def metric_of(epoch: ScoredEpoch, part: str, metric: str) -> float | None:
    """A metric of the training or the validation part in an epoch; None if it was not measured."""
    score: Score | None = getattr(epoch, part)
    if score is not None and metric in score._fields:
        found: float = getattr(score, metric)
        return found
    return epoch.metrics.get(metric) if part == "validation" else None


@dataclass(frozen=True)
class Best:
    """The best epoch by the metric `by`, such as validation_accuracy.

    Attributes:
        higher: whether higher values are better.
        value, epoch: the best value and its epoch; None and 0 before the first epoch ends.
        to_beat: the reference of early stopping: the last value that improved on its predecessor by more than
            `min_delta`.
        waited: epochs since `to_beat` was set.
    """

    by: BestBy
    higher: Bool
    value: Measured | None
    epoch: Total
    to_beat: Measured | None
    waited: Total

    @classmethod
    def start(cls, by: str, higher: bool) -> Best:
        """The record before the first epoch ends."""
        return cls(by, higher, None, 0, None, 0)

    def after(self, epoch: ScoredEpoch, min_delta: float = 0.0) -> Best:
        """The record after an epoch ended.

        Among equal epochs the first one counts. An epoch without the metric is no improvement.
        """
        value = self.measured(epoch)
        if value is None:
            return replace(self, waited=self.waited + 1)
        if self._gain(value, self.to_beat) > min_delta:
            updated = replace(self, to_beat=value, waited=0)
        else:
            updated = replace(self, waited=self.waited + 1)
        return replace(updated, value=value, epoch=epoch.epoch) if self._gain(value, self.value) > 0 else updated

    def measured(self, epoch: ScoredEpoch) -> float | None:
        """The metric of an epoch; None if it was not measured."""
        part, _, metric = self.by.partition("_")
        return metric_of(epoch, part, metric)

    def _gain(self, value: float, reference: float | None) -> float:
        """The improvement over `reference`: positive is better, whether high or low values are."""
        if reference is None:
            return float("inf")
        return value - reference if self.higher else reference - value


LOST = Best.start("", higher=False)
"""Stands for a damaged record in a checkpoint. Resumption looks for the best epoch anew."""


@dataclass(frozen=True)
class Progress:
    """The position of a run in its training.

    Attributes:
        best: the best epoch so far.
        epoch: the number of the current epoch, from 1; between two epochs, the number of the next one.
        step: steps taken in total.
        batches: steps taken in this epoch.
        loss, sums, images: the sum of the losses, the task's sums, and the number of images, of this epoch so far.
        evaluated: whether the weights have been evaluated since the last step.
        train, validation: the scores of the last evaluated epoch.
        stopped: whether the optimizer has stopped: its line search finds no better weights.
    """

    best: Annotated[Best, records.otherwise(LOST)]
    epoch: Size
    step: Total
    batches: Total
    loss: Measured
    sums: tuple[Measured, ...]
    images: Total
    evaluated: Bool
    train: Score | None
    validation: Score | None
    stopped: Bool = False

    @classmethod
    def start(cls, best: Best, task: Task) -> Progress:
        """The progress before the first step; `best` is the record before the first epoch."""
        return cls(
            best=best, epoch=1, step=0, batches=0, loss=0.0, sums=(0.0,) * task.zero().size, images=0,
            evaluated=True, train=None, validation=None,
        )  # fmt: skip

    @property
    def epochs_done(self) -> int:
        """Epochs trained on, including one that is only partly done."""
        return self.epoch - (self.batches == 0)

    def after(self, losses: Sequence[float], sums: Sequence[Sequence[float]], sizes: Sequence[int]) -> Progress:
        """The progress after more steps, from the mean loss, the task's sums and the size of each step's batch."""
        loss, total = self.loss, self.sums
        for x, more, size in zip(losses, sums, sizes, strict=True):
            loss += x * size  # one step at a time: the rounding must not depend on where a run was stopped
            total = tuple(a + b for a, b in zip(total, more, strict=True))
        return replace(
            self,
            step=self.step + len(sizes),
            batches=self.batches + len(sizes),
            loss=loss,
            sums=total,
            images=self.images + sum(sizes),
            evaluated=False,
        )

    def after_evaluation(
        self, best: Best, train: Score, validation: Score | None, steps_per_epoch: int, stopped: bool
    ) -> Progress:
        """The progress after an evaluation with these scores. It moves to the next epoch if this one is complete."""
        updated = replace(self, best=best, evaluated=True, train=train, validation=validation, stopped=stopped)
        if self.batches < steps_per_epoch:
            return updated
        return replace(updated, epoch=self.epoch + 1, batches=0, loss=0.0, sums=(0.0,) * len(self.sums), images=0)

    def score(self, task: Task, labels: Labels) -> Score:
        """The score over the images of this epoch so far, which have these labels."""
        return task.score(self.loss / self.images, self.sums, self.images, labels)


METRICS = "metrics.jsonl"

StopReason: TypeAlias = Literal["interrupted", "not_finite"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Interval:
    """Consecutive steps whose metrics were read together; `step` (from 1) is the last one, `train` their score."""

    kind: Literal["interval"] = field(default="interval", kw_only=True)
    epoch: Size
    step: Size
    train: Score
    learning_rate: Measured
    images_per_second: Duration


@dataclass(frozen=True)
class Epoch:
    """A pass over the training images; `train` is the mean score during the pass, while the weights were changing.

    `metrics` are the single numbers of `training.metrics` on the validation images.
    """

    kind: Literal["epoch"] = field(default="epoch", kw_only=True)
    epoch: Size
    step: Size
    train: Score
    validation: Score | None
    seconds: Duration
    images_per_second: Duration
    metrics: dict[str, Measured] = field(default_factory=dict)


@dataclass(frozen=True)
class Validated:
    """The score on the validation examples within an epoch, after `step` steps; see `training.validate_every`."""

    kind: Literal["validation"] = field(default="validation", kw_only=True)
    epoch: Size
    step: Size
    validation: Score


@dataclass(frozen=True)
class Stopped:
    """The run stopped before its end, at this position of its last checkpoint."""

    kind: Literal["stopped"] = field(default="stopped", kw_only=True)
    reason: StopReason
    epoch: Size
    step: Total


@dataclass(frozen=True)
class ResumedAt:
    """The run was resumed at this position; lines about later steps become void."""

    kind: Literal["resumed"] = field(default="resumed", kw_only=True)
    epoch: Size
    step: Total


@dataclass(frozen=True)
class Tested:
    """The score on the test images at the end of the run, and the single numbers of `training.metrics` on them."""

    kind: Literal["test"] = field(default="test", kw_only=True)
    epoch: Size
    step: Total
    test: Score
    metrics: dict[str, Measured] = field(default_factory=dict)


Line: TypeAlias = Annotated[Interval | Epoch | Validated | Stopped | ResumedAt | Tested, records.by("kind")]


class MetricsFolder:
    """A folder with the file METRICS, which grows by whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def locked(self) -> AbstractContextManager[None]:
        """Lock the folder against other training processes during a `with` block.

        Raises AdtrainError where another process holds the lock. Does nothing on systems without fcntl.
        """
        return locked_by(self.path / METRICS)

    def append_metrics(self, record: object, durable: bool = False) -> None:
        """Append a line, which with `durable` survives a power failure. If the disk is full, nothing is appended.

        Raises AdtrainError where the line cannot be written.
        """
        append_line(self.path / METRICS, json.dumps(records.plain(record), allow_nan=False), durable)

    def drop_unfinished_line(self) -> None:
        """Drop the line that a killed process has begun. Raises AdtrainError where the file cannot be changed."""
        path = self.path / METRICS
        content = read_file(path)
        try:
            os.truncate(path, content.rfind(b"\n") + 1)
        except OSError as error:
            raise unwritable(path, error) from error


def read_metrics(run: Path) -> list[Line]:
    """The valid lines of a run's metrics.jsonl; an unfinished last line is skipped.

    When a run resumes at step S of epoch E, earlier lines about steps after S, and those of kind "epoch" from epoch E
    on, become void. Damaged lines are skipped with one warning that describes the first of them.
    Raises AdtrainError where the file cannot be read.
    """
    found: list[Line] = []
    for line in read_lines(run / METRICS, Line):
        if isinstance(line, ResumedAt):
            at = line
            found = [x for x in found if x.step <= at.step and not (isinstance(x, Epoch) and x.epoch >= at.epoch)]
        found.append(line)
    return _of_one_task(found, run / METRICS)


def _of_one_task(lines: list[Line], path: Path) -> list[Line]:
    """The lines with the kind of score that most have. A damaged line may look like that of another task."""
    parts = ("train", "validation", "test")
    kinds = [{type(score) for part in parts if (score := getattr(line, part, None))} for line in lines]
    counted = Counter(kind for found in kinds for kind in found).most_common()
    if len(counted) < 2:
        return lines
    _log.warning("adtrain: warning: %s: found scores without all metrics, expected each; these lines are skipped", path)
    return [line for line, found in zip(lines, kinds, strict=True) if found <= {counted[0][0]}]


def read_lines(path: Path, kind: Any) -> list[Any]:
    """The records of type `kind` in the lines of a file; an unfinished last line is skipped.

    Damaged lines are skipped with one warning that describes the first of them.
    Raises AdtrainError where the file cannot be read.
    """
    *lines, _unfinished = read_file(path).split(b"\n")
    found, damaged = list[Any](), list[str]()
    for number, content in enumerate(lines, 1):
        try:
            found.append(records.parse(kind, content, f"{path}:{number}"))
        except records.RecordError as error:
            damaged.append(str(error))
    if damaged:
        more = f", and {len(damaged) - 1:,} more" if len(damaged) > 1 else ""
        _log.warning("adtrain: warning: %s; this line is skipped%s", damaged[0], more)
    return found
