"""Finds the times that changed between two results of `adtrain bench` by more than their noise."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from adtrain.bench.timing.protocol import busy
from adtrain.config import records
from adtrain.config.values import Duration, Milliseconds
from adtrain.core.errors import AdtrainError
from adtrain.files import read_regular
from adtrain.option_types import Size

MIN_CHANGE = 0.02
"""Smaller relative changes are not listed."""

MIN_MS = 1e-9
"""Shorter times are not compared."""


@dataclass(frozen=True)
class Time:
    """The part of a `TimingRecord` that is compared."""

    median_ms: Milliseconds
    low_ms: Milliseconds
    high_ms: Milliseconds


@dataclass(frozen=True)
class Conditions:
    """The part of a result's protocol that is compared or leads to a warning."""

    device_name: str
    load: Duration | None = None
    cores: Size | None = None


@dataclass(frozen=True)
class Head:
    """What every result of `adtrain bench --json` has."""

    kind: Literal["ops", "config", "against", "analysis"]
    protocol: Conditions


TIMES = {field.name for field in fields(Time)}


class Change(NamedTuple):
    """A time before and after, in milliseconds."""

    name: str
    before_ms: float
    after_ms: float

    @property
    def relative(self) -> float:
        """0.1 is 10% slower, -0.1 is 10% faster."""
        return self.after_ms / self.before_ms - 1


class Differences(NamedTuple):
    """How two results differ.

    Attributes:
        slower, faster: times that changed, the largest factor first.
        same: the number of times that did not change.
        only_before, only_after: names of times that only one result has.
        protocol: the entries of the protocol that differ, as (before, after).
    """

    slower: list[Change]
    faster: list[Change]
    same: int
    only_before: list[str]
    only_after: list[str]
    protocol: dict[str, tuple[Any, Any]]


def read(path: str | Path) -> dict[str, Any]:
    """The result in a file of `adtrain bench --json`.

    Raises:
        AdtrainError: the file cannot be read, or is not such a result.
    """
    try:
        content = read_regular(path)
    except OSError as error:
        raise AdtrainError(f"{path}: cannot be read: {error.strerror}") from None
    found: dict[str, Any] = records.parse_any(content, str(path))
    records.check(Head, found, str(path))
    for name, time in times(found):
        records.check(Time, time, f"{path}: {name!r}")
    return found


def compare(before: Mapping[str, Any], after: Mapping[str, Any], names: tuple[str, str]) -> Differences:
    """A time changed if its confidence intervals do not overlap, and its medians are more than MIN_CHANGE apart.

    For a time that did not change, two 95% intervals fail to overlap about once in two hundred cases. The intervals
    cover only the seconds in which the samples were taken, not later changes of the machine's load.

    Args:
        names: of the two results, for messages.

    Raises:
        AdtrainError: the results are of different kinds or devices.
    """
    for what, of in (("kind", lambda x: x["kind"]), ("device", lambda x: x["protocol"]["device_name"])):
        if of(before) != of(after):
            raise AdtrainError(
                f"--compare: {names[0]} is of {what} {of(before)}, {names[1]} of {of(after)}; "
                f"expected two results of one {what}"
            )
    old, new = dict(times(before)), dict(times(after))
    pairs = [Change(name, old[name]["median_ms"], new[name]["median_ms"]) for name in old if name in new]
    changes = [each for each in pairs if _is_significant(each, old[each.name], new[each.name])]
    slower, faster = (
        sorted((each for each in changes if (each.relative > 0) == up), key=lambda each: -abs(_log(each)))
        for up in (True, False)
    )
    about = before["protocol"], after["protocol"]
    differing = {key: (about[0].get(key), about[1].get(key)) for key in sorted(about[0].keys() | about[1].keys())}
    return Differences(
        slower,
        faster,
        len(pairs) - len(changes),
        [name for name in old if name not in new],
        [name for name in new if name not in old],
        {
            key: pair
            for key, pair in differing.items()
            if pair[0] != pair[1] and key not in ("date", "load", "overhead_ms")
        },
    )


def result(before: str, after: str) -> dict[str, Any]:
    """The differences of the results in two files, as JSON values. Raises AdtrainError as `read` and `compare`."""
    found = compare(read(before), read(after), (before, after))
    changes = {
        kind: [{**each._asdict(), "change": each.relative} for each in getattr(found, kind)]
        for kind in ("slower", "faster")
    }
    return {"kind": "compare", "before": before, "after": after, **found._asdict(), **changes}


def warnings(paths: Sequence[str]) -> list[str]:
    """A line for each of the files whose result was measured on a busy machine."""
    return [f"{path}: {warning}" for path in paths if (warning := busy(read(path)["protocol"]))]


def times(result: Any) -> Iterator[tuple[str, Mapping[str, float]]]:
    """The name and record of every time in a result. The name is the path of keys to it, with the texts of the list
    elements on the path. Times with equal names are numbered."""
    seen: Counter[str] = Counter()
    for name, record in _walk(result, ()):
        seen[name] += 1
        yield (name if seen[name] == 1 else f"{name} #{seen[name]}"), record


def _walk(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Mapping[str, float]]]:
    if isinstance(node, Mapping):
        if node.keys() >= TIMES:
            yield " ".join(path), node
            return
        for key, value in node.items():
            yield from _walk(value, path if key in ("time", "protocol") else (*path, key))
    elif isinstance(node, list):
        for each in node:
            if isinstance(each, Mapping):
                texts = [value for value in each.values() if isinstance(value, str) and value]
                yield from _walk(each, (*path, *texts))


def _is_significant(change: Change, old: Mapping[str, float], new: Mapping[str, float]) -> bool:
    apart = old["high_ms"] < new["low_ms"] or new["high_ms"] < old["low_ms"]
    return apart and change.before_ms > MIN_MS and abs(change.relative) > MIN_CHANGE


def _log(change: Change) -> float:
    return math.log(change.after_ms) - math.log(change.before_ms) if change.after_ms > 0 else math.inf
