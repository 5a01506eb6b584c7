"""Finds the times that changed between two results of `adtrain bench` by more than their noise."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from adtrain.bench.stored import KINDS, Kind, NamedTime, Result
from adtrain.bench.timing.protocol import busy
from adtrain.bench.timing.sampling import NOISY
from adtrain.config import records
from adtrain.config.problems import dotted
from adtrain.core.errors import AdtrainError
from adtrain.files import read_regular

MIN_CHANGE = 0.02
"""Smaller relative changes are not listed."""

MIN_MS = 1e-9
"""Shorter times are not compared."""

MEASURED = ("date", "load", "overhead_ms", "roofline")
"""Entries of a protocol that are measured, and differ between any two results."""


class Change(NamedTuple):
    """A time before and after."""

    name: str
    before: NamedTime
    after: NamedTime

    @property
    def relative(self) -> float:
        """0.1 is 10% slower, -0.1 is 10% faster."""
        return self.after.time.median_ms / self.before.time.median_ms - 1

    @property
    def verdict(self) -> str:
        """The times are "slower" or "faster" if the confidence intervals do not overlap, and the medians are more than
        MIN_CHANGE apart; otherwise they are the "same"."""
        old, new = self.before.time, self.after.time
        apart = old.high_ms < new.low_ms or new.high_ms < old.low_ms
        if not apart or old.median_ms <= MIN_MS or abs(self.relative) <= MIN_CHANGE:
            return "same"
        return "slower" if self.relative > 0 else "faster"

    @property
    def factor(self) -> float:
        """The logarithm of the larger time over the smaller one."""
        after = self.after.time.median_ms
        return abs(math.log(after) - math.log(self.before.time.median_ms)) if after > 0 else math.inf

    def record(self) -> dict[str, Any]:
        """The change as JSON values."""
        old, new = self.before.time, self.after.time
        return {
            "name": self.name,
            "before_ms": old.median_ms,
            "after_ms": new.median_ms,
            "before_noisy": old.noisy,
            "after_noisy": new.noisy,
            "change": self.relative if old.median_ms > MIN_MS else None,
            "verdict": self.verdict,
        }


def result(before: str, after: str) -> dict[str, Any]:
    """The differences between the results in two files, as JSON values:

    - "steps": all times of whole training steps;
    - "slower", "faster": the other times that changed, the largest factor first; "same": the number of the others;
    - "only_before", "only_after": names of times that only one result has;
    - "protocol": the conditions that differ, as (before, after), by dotted key;
    - "noise": a line for each reason to distrust a result.

    For a time that did not change, two 95% intervals fail to overlap about once in two hundred cases. The intervals
    cover only the seconds in which the samples were taken, not later changes of the machine's load.

    Raises:
        AdtrainError: a file cannot be read or holds no such result, or they are of different kinds or devices.
    """
    texts = [(path, *read(path)) for path in (before, after)]
    (_, old_values, old), (_, new_values, new) = texts
    for what, one, other in (
        ("kind", old.kind, new.kind),
        ("device", old.protocol.device_name, new.protocol.device_name),
    ):
        if one != other:
            raise AdtrainError(f"{before} is of {what} {one}, {after} of {other}; expected two results of one {what}")
    old_times, new_times = times(old), times(new)
    changes = [Change(name, old_times[name], new_times[name]) for name in old_times if name in new_times]
    parts = [change for change in changes if not change.before.whole]
    listed = {
        verdict: sorted((x for x in parts if x.verdict == verdict), key=lambda x: -x.factor)
        for verdict in ("slower", "faster", "same")
    }
    return {
        "kind": "compare",
        "before": before,
        "after": after,
        "noise": [f"{path}: {reason}" for path, values, found in texts for reason in _noise(values, found)],
        "protocol": _differing(_conditions(old_values), _conditions(new_values)),
        "steps": [change.record() for change in changes if change.before.whole],
        **{verdict: [change.record() for change in listed[verdict]] for verdict in ("slower", "faster")},
        "same": len(listed["same"]),
        "only_before": [name for name in old_times if name not in new_times],
        "only_after": [name for name in new_times if name not in old_times],
    }


def read(path: str | Path) -> tuple[dict[str, Any], Result]:
    """The result in a file of `adtrain bench --json-file`: all its values, and those that are compared.

    Raises:
        AdtrainError: the file cannot be read, or is not such a result.
    """
    try:
        content = read_regular(path)
    except OSError as error:
        raise AdtrainError(f"{path}: cannot be read: {error.strerror}") from None
    values = records.parse_any(content, str(path))
    kind = records.check(Kind, values, str(path)).kind
    found: Result = records.check(KINDS[kind], values, str(path))
    return values, found


def times(result: Result) -> dict[str, NamedTime]:
    """The times of a result by name; equal names are numbered."""
    seen: Counter[str] = Counter()
    found = {}
    for each in result.times():
        seen[each.name] += 1
        found[each.name if seen[each.name] == 1 else f"{each.name} #{seen[each.name]}"] = each
    return found


def _noise(values: Mapping[str, Any], result: Result) -> list[str]:
    """Reasons to distrust the times of a result."""
    found = [each.time.noisy for each in result.times()]
    reasons = [warning] if (warning := busy(values["protocol"])) else []
    if noisy := sum(found):
        reasons.append(f"{noisy} of {len(found)} times have an interval wider than {NOISY:.0%} of the median")
    return reasons


def _conditions(values: Mapping[str, Any]) -> dict[str, Any]:
    """The conditions of a result: the leaves of its protocol, and what was measured, by dotted key."""
    found = {key: values[key] for key in ("config", "precision", "batch_size") if key in values}
    found |= {key: value for key, value in values["protocol"].items() if key not in MEASURED}
    return {dotted(path): value for path, value in records.leaves(found)}


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    pairs = {key: (before.get(key), after.get(key)) for key in dict.fromkeys([*before, *after])}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
