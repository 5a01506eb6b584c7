"""The records in a sweep's folder: options, the metrics of epochs, and the results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from adtrain.config.sweep_section import Metric, Values
from adtrain.config.values import Bool, Duration, Measured, Sha256, Total
from adtrain.option_types import Size
from adtrain.training.scores import HIGHER_IS_BETTER, Score
from adtrain.training.summary import MetricValues

FORMAT = 4
LAST_EPOCH_FORMAT = 3
"""The format of sweeps whose members all end with the weights of their last epoch."""


@dataclass(frozen=True)
class SweepOptions:
    """Options of the command that decide about the result.

    Attributes:
        halving: the epochs after which the worse half of the members is dropped.
        rank_by: the metric that ranks members.
    """

    halving: tuple[Size, ...]
    rank_by: Metric
    format: Total = FORMAT


@dataclass(frozen=True)
class SweepData:
    """The content of data.json: the digests of the data that the members are trained on, by their names."""

    digests: dict[str, Sha256]


@dataclass(frozen=True)
class MemberEpoch:
    """A member's scores after an epoch.

    Attributes:
        metrics: the single numbers of the metrics that are not in the scores, on the validation part.
        failed_at: the step, from 1, with the first loss that is not finite, or the last step of the epoch if only its
            new state is not; None if all numbers are finite. The member has no further epochs.
    """

    member: Total
    epoch: Size
    train: Score | None
    validation: Score | None
    failed_at: Total | None
    metrics: dict[str, Measured] = field(default_factory=dict)


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
    epoch: Size
    seconds: Duration
    added_seconds: Duration
    members: tuple[MemberEpoch, ...]


Status: TypeAlias = Literal["finished", "dropped", "failed"]


@dataclass(frozen=True)
class MemberResult:
    """The result of a member.

    Attributes:
        rank: from 1, the best member, in the order of `ranking.ranked`.
        status: "finished", "dropped" by halving, or "failed".
        epochs: those that it trained; of a failed member the last one is that in which it failed.
        value: by `SweepOptions.rank_by`; None if it failed.
        train, validation: of the epoch whose weights it has, of a failed member those of its last epoch.
        test: None if it was dropped or failed.
        model_epoch: the epoch whose weights it has; None if it failed, and in sweeps of format 3, where it is the last.
        metrics: those that are not in the scores, on the test part.
    """

    rank: Size
    member: Total
    group: Total
    values: Values
    status: Status
    epochs: Size
    failed_at: Total | None
    value: Measured | None
    train: Score | None
    validation: Score | None
    test: Score | None
    model_epoch: Size | None = None
    metrics: MetricValues = field(default_factory=dict)

    @property
    def ending(self) -> str:
        """How its training ended, in words; nothing if it has the weights of its last epoch."""
        if self.status == "failed":
            return f"failed in epoch {self.epochs}, at step {self.failed_at}"
        if self.status == "dropped":
            return f"dropped after epoch {self.epochs}"
        restored = self.model_epoch not in (None, self.epochs)
        return f"weights of epoch {self.model_epoch} of {self.epochs}" if restored else ""


@dataclass(frozen=True)
class SweepResults:
    """The content of results.json: the members in the order of their ranks.

    Attributes:
        seconds: from the start of the process that ended the sweep.
        train_seconds: of the training of all processes of the sweep.
        higher_is_better: whether higher values of the metric are; None in sweeps of format 3, whose metric is known.
    """

    rank_by: Metric
    device: str
    device_name: str
    seconds: Duration
    train_seconds: Duration
    members: tuple[MemberResult, ...]
    higher_is_better: Bool | None = None

    @property
    def higher(self) -> bool:
        """Whether higher values of the metric are better."""
        known = self.rank_by.partition("_")[2] in HIGHER_IS_BETTER
        return known if self.higher_is_better is None else self.higher_is_better

    def disagreement(self) -> str | None:
        """What shows that the members are not those of one sweep; None where nothing does."""
        metric = self.rank_by.partition("_")[2]
        if not self.members:
            return "no members"
        if sorted(x.member for x in self.members) != list(range(len(self.members))):
            return "other members than 0, 1, ..."
        if [x.rank for x in self.members] != list(range(1, len(self.members) + 1)):
            return "other ranks than 1, 2, ..."
        if any(x.values.keys() != self.members[0].values.keys() for x in self.members):
            return "members with values for other keys"
        parts = [score for x in self.members for score in (x.train, x.validation, x.test) if score is not None]
        if any(type(score) is not type(parts[0]) for score in parts):
            return "members with other metrics"
        finished = [x for x in self.members if x.status == "finished" and x.value is not None]
        if any(x.test is not None and metric not in (*x.test._fields, *x.metrics) for x in finished):
            return f"rank_by {self.rank_by}, which the members do not have"
        if any(x.train is None and x.status == "finished" for x in self.members):
            return "a finished member without scores"
        return None
