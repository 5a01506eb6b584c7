"""The records in a sweep's folder: options, the metrics of epochs, and the results; and the ranking of members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal, TypeAlias

from adtrain.config.records import Bool, Duration, Measured, Sha256, Total
from adtrain.config.sweep_section import Metric, Values
from adtrain.metrics import MetricValue
from adtrain.option_types import Size
from adtrain.training.progress import metric_of
from adtrain.training.scores import Score, single_numbers
from adtrain.training.summary import MetricValues

FORMAT = 4


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
        rank: from 1, the best member, in the order of `ranked`.
        status: "finished", "dropped" by halving, or "failed".
        epochs: those that it trained; of a failed member the last one is that in which it failed.
        value: by `SweepOptions.rank_by`; None if it failed.
        train, validation: of the epoch whose weights it has, of a failed member those of its last epoch.
        test: None if it was dropped or failed.
        model_epoch: the epoch whose weights it has; None if it failed.
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
    model_epoch: Size | None
    metrics: MetricValues

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
        higher_is_better: whether higher values of the metric are better.
    """

    rank_by: Metric
    device: str
    device_name: str
    seconds: Duration
    train_seconds: Duration
    members: tuple[MemberResult, ...]
    higher_is_better: Bool

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


@dataclass(frozen=True)
class OnTest:
    """A member's results on the test part; `metrics` are those that are not in the score."""

    score: Score | None
    metrics: Mapping[str, MetricValue] = field(default_factory=dict)


@dataclass(frozen=True)
class Criterion:
    """What ranks members: a part and a metric, such as "validation" and "accuracy"."""

    part: str
    metric: str
    higher_is_better: bool

    @classmethod
    def of(cls, name: str, higher_is_better: bool) -> Criterion:
        """The criterion of a name such as "validation_accuracy"."""
        part, _, metric = name.partition("_")
        return cls(part, metric, higher_is_better)

    def __str__(self) -> str:
        return f"{self.part}_{self.metric}"

    def best(self, values: Sequence[float]) -> float:
        """The best of several values."""
        return max(values) if self.higher_is_better else min(values)

    def value(self, found: MemberEpoch, test: OnTest | None = None) -> float | None:
        """A member's value, of this epoch or of the test part; None if it failed, or was not measured on that part."""
        return self._number(self.metric, found, test)

    def key(self, found: MemberEpoch, test: OnTest | None = None) -> tuple[float, ...]:
        """Sorts the best member first, those without a value last; equal ones by the loss, then by number."""
        value, loss = (self._number(name, found, test) for name in (self.metric, "loss"))
        signed = value is not None and (-value if self.higher_is_better else value)
        return value is None, signed, loss is None, loss or 0.0, found.member

    def _number(self, metric: str, found: MemberEpoch, test: OnTest | None) -> float | None:
        if self.part == "test":
            scored = test.score._asdict() if test and test.score else {}
            number = {**single_numbers(test.metrics if test else {}), **scored}.get(metric)
        else:
            number = metric_of(found, self.part, metric)
        return number if number is not None and isfinite(number) else None


def survivors(alive: Sequence[int], models: Mapping[int, MemberEpoch], criterion: Criterion) -> list[int]:
    """The better half of the members, at least one, in the order of their numbers.

    Those that failed are worse than all others, and go on only if all failed.

    Args:
        models: by number the epoch whose weights a member would end with, or in which it failed.
    """
    finite = [number for number in alive if models[number].failed_at is None]
    ordered = sorted(finite, key=lambda number: criterion.key(models[number]))
    kept = ordered[: max(1, -(-len(alive) // 2))]
    return sorted(kept or alive[:1])


def ranked(
    models: Mapping[int, MemberEpoch],
    tests: Mapping[int, OnTest],
    survived: Mapping[int, int],
    criterion: Criterion,
    halving_criterion: Criterion,
) -> list[tuple[int, Status, float | None]]:
    """(member, status, value) of all members, the best first.

    Members that trained to the end come first, by their values, however many epochs each of them has. Then come dropped
    members, by the number of rungs that they survived (`survived`, by number), because survivors of a rung were better
    there than members that were dropped after it. Members that were dropped after the same rung are ranked by their
    values there. Failed members come last, by the number of epochs that they trained.

    Args:
        models: as for `survivors`.
        tests: by number the results on the test part of members that trained to the end.
        halving_criterion: the criterion by which members were dropped.
    """
    rows = []
    for number, model in models.items():
        test = tests.get(number)
        value = criterion.value(model, test) if model.failed_at is None else None
        key: tuple[float, ...]
        status: Status
        if model.failed_at is not None:
            status, key = "failed", (2, -model.epoch, number)
        elif test is not None:
            status, key = "finished", (0, *criterion.key(model, test))
        else:
            status, key = "dropped", (1, -survived[number], *halving_criterion.key(model))
        rows.append((key, (number, status, value)))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]
