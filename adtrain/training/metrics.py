"""metrics.jsonl: one line for each interval, epoch, stop, resumption and test of a run."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from adtrain.config import records
from adtrain.config.values import Duration, Measured, Total
from adtrain.files import read_file
from adtrain.option_types import Size
from adtrain.training.scores import Score

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


Line: TypeAlias = Annotated[Interval | Epoch | Stopped | ResumedAt | Tested, records.by("kind")]


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
    return found


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
