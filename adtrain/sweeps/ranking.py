"""The ranking of members by a metric, such as "validation_accuracy"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

from adtrain.metrics import MetricValue
from adtrain.sweeps.records import MemberEpoch, Status
from adtrain.training.scores import Score, single_numbers


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
        score = {"train": found.train, "validation": found.validation, "test": test.score if test else None}[self.part]
        others = {"validation": found.metrics, "test": single_numbers(test.metrics) if test else {}}
        if score is not None and metric in score._fields:
            number: float | None = float(getattr(score, metric))
        else:
            number = others.get(self.part, {}).get(metric)
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
    of_survival: Criterion,
) -> list[tuple[int, Status, float | None]]:
    """(member, status, value) of all members, the best first.

    Members that trained to the end are ranked by their values, however many epochs each of them has. Then come those
    that were dropped, then those that failed. Of two that were dropped, the one comes first that survived more rungs
    (`survived`, by number), because it was better than the other where both were compared; of the same rung, the one
    with the better value there. Of two that failed, the one comes first that trained longer.

    Args:
        models: as for `survivors`.
        tests: by number the results on the test part of members that trained to the end.
        of_survival: the criterion by which members were dropped.
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
            status, key = "dropped", (1, -survived[number], *of_survival.key(model))
        rows.append((key, (number, status, value)))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]
