"""The ranking of members by a metric, such as "validation_accuracy"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from adtrain.sweeps.records import MemberEpoch, Status
from adtrain.training.scores import HIGHER_IS_BETTER, Score


def higher_is_better(metric: str) -> bool:
    return metric.partition("_")[2] in HIGHER_IS_BETTER


def best(values: Sequence[float], metric: str) -> float:
    """The best of several values."""
    return max(values) if higher_is_better(metric) else min(values)


def value(found: MemberEpoch, metric: str, test: Score | None = None) -> float | None:
    """A member's value of the metric; None if it failed, or was not scored on that part."""
    part, _, name = metric.partition("_")
    score = {"train": found.train, "validation": found.validation, "test": test}[part]
    number = None if score is None else float(getattr(score, name))
    return number if number is not None and isfinite(number) else None


def survivors(
    alive: Sequence[int], history: Mapping[int, Mapping[int, MemberEpoch]], epoch: int, metric: str
) -> list[int]:
    """The better half of the members after an epoch, at least one, in the order of their numbers.

    Those that failed are worse than all others, and go on only if all failed. A test metric is replaced by that of the
    training part, because the test part must not decide who goes on.
    """
    by = _of_survival(metric)

    def last(number: int) -> MemberEpoch:
        return history[number][max(x for x in history[number] if x <= epoch)]

    finite = [number for number in alive if last(number).failed_at is None]
    ordered = sorted(finite, key=lambda number: _key(value(last(number), by), by, number))
    kept = ordered[: max(1, -(-len(alive) // 2))]
    return sorted(kept or alive[:1])


def _of_survival(metric: str) -> str:
    """The metric by which members are dropped."""
    return metric if not metric.startswith("test_") else f"train_{metric.partition('_')[2]}"


def ranked(
    history: Mapping[int, Mapping[int, MemberEpoch]],
    tests: Mapping[int, Score | None],
    survived: Mapping[int, int],
    metric: str,
) -> list[tuple[int, Status, float | None]]:
    """(member, status, value) of all members, the best first.

    Members that trained to the end are ranked by their values, however many epochs each of them has. Then come those
    that were dropped, then those that failed. Of two that were dropped, the one comes first that survived more rungs
    (`survived`, by number), because it was better than the other where both were compared; of the same rung, the one
    with the better value there. Of two that failed, the one comes first that trained longer.
    """
    rows = []
    for number, epochs in history.items():
        last = epochs[max(epochs)]
        test = tests.get(number)
        found = value(last, metric, test) if last.failed_at is None else None
        key: tuple[float, ...]
        status: Status
        if last.failed_at is not None:
            status, key = "failed", (2, -last.epoch, number)
        elif number in tests:
            status, key = "finished", (0, *_key(found, metric, number))
        else:
            by = _of_survival(metric)
            status, key = "dropped", (1, -survived[number], *_key(value(last, by), by, number))
        rows.append((key, (number, status, found)))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def _key(found: float | None, metric: str, number: int) -> tuple[bool, float, int]:
    """Sorts the best value first, none last; equal ones by number."""
    if found is None:
        return True, 0.0, number
    return False, -found if higher_is_better(metric) else found, number
