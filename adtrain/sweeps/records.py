"""The records in a sweep's folder: options, the metrics of epochs, and the results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from adtrain.config.values import Duration, Total
from adtrain.training.scores import Score

FORMAT = 3


@dataclass(frozen=True)
class SweepOptions:
    """Options of the command that decide about the result.

    Attributes:
        halving: the epochs after which the worse half of the members is dropped.
        rank_by: the metric that ranks members.
    """

    halving: tuple[Total, ...]
    rank_by: str
    format: Total = FORMAT


@dataclass(frozen=True)
class MemberEpoch:
    """A member's scores after an epoch.

    Attributes:
        failed_at: the step, from 1, with the first loss that is not finite, or the last step of the epoch if only its
            new state is not; None if all numbers are finite. The member has no further epochs.
    """

    member: Total
    epoch: Total
    train: Score | None
    validation: Score | None
    failed_at: Total | None


@dataclass(frozen=True)
class EpochLine:
    """The line of an epoch of a wave in metrics.jsonl.

    Attributes:
        seconds: of the epoch's training.
        added_seconds: the part of `seconds` that no earlier line counts. Epochs overlap if groups are trained side by
            side. The sum over all lines is the time of training.
    """

    rung: Total
    group: Total
    epoch: Total
    seconds: Duration
    added_seconds: Duration
    members: tuple[MemberEpoch, ...]


@dataclass(frozen=True)
class MemberResult:
    """The result of a member.

    Attributes:
        rank: from 1, the best member, in the order of `ranking.ranked`.
        status: "finished", "dropped" by halving, or "failed".
        epochs: those that it trained; of a failed member the last one is that in which it failed.
        value: by `SweepOptions.rank_by`, of the last epoch; None if it failed.
        train, validation: of the last epoch. test: None if it was dropped or failed.
    """

    rank: Total
    member: Total
    group: Total
    values: dict[str, Any]
    status: str
    epochs: Total
    failed_at: Total | None
    value: float | None
    train: Score | None
    validation: Score | None
    test: Score | None


@dataclass(frozen=True)
class SweepResults:
    """The content of results.json: the members in the order of their ranks.

    Attributes:
        seconds: from the start of the process that ended the sweep.
        train_seconds: of the training of all processes of the sweep.
    """

    rank_by: str
    device: str
    device_name: str
    seconds: Duration
    train_seconds: Duration
    members: tuple[MemberResult, ...]
