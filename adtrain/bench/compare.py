"""Finds the times that changed between two results of `adtrain bench` by more than their noise."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from adtrain.bench import page
from adtrain.bench.against import Against
from adtrain.bench.candidates import Candidates
from adtrain.bench.devices import Devices
from adtrain.bench.ops import Ops
from adtrain.bench.race import Race
from adtrain.bench.result import NamedTime, Result, TimedResult
from adtrain.bench.sampling import NOISY
from adtrain.bench.scaling import Scaling
from adtrain.bench.startup import Startup
from adtrain.bench.step import Step
from adtrain.bench.view import GAP, Column, Note, Part, Picture, Section, Table, Tiles, View, milliseconds
from adtrain.config import records
from adtrain.config.problems import dotted
from adtrain.config.records import plain
from adtrain.core.errors import AdtrainError
from adtrain.files import read_regular
from adtrain.table import TEXT, CellFormat

KINDS: dict[str, type[TimedResult]] = {
    kind.kind: kind for kind in (Ops, Candidates, Step, Scaling, Startup, Against, Devices, Race)
}

MIN_CHANGE = 0.02
"""Smaller relative changes are not listed."""

MIN_MS = 1e-9
"""Shorter times are not compared."""

MEASURED = ("date", "load", "overhead_ms", "roofline")
"""Entries of a protocol that are measured, and differ between any two results."""


@dataclass(frozen=True)
class Changed:
    """A time before and after.

    Attributes:
        change: relative: 0.1 is 10% slower. None where the time before is too short.
        verdict: the times are "slower" or "faster" if the confidence intervals do not overlap, and the medians are more
            than MIN_CHANGE apart; otherwise they are the "same". A time without an interval counts as exact.
    """

    name: str
    before_ms: float
    after_ms: float
    before_noisy: bool
    after_noisy: bool
    change: float | None
    verdict: str

    @property
    def factor(self) -> float:
        """The logarithm of the larger time over the smaller one."""
        return abs(math.log(self.after_ms) - math.log(self.before_ms)) if self.after_ms > 0 else math.inf


def changed(name: str, old: NamedTime, new: NamedTime) -> Changed:
    """The change from one time to another."""
    (old_low, old_high), (new_low, new_high) = old.ends, new.ends
    change = new.median_ms / old.median_ms - 1 if old.median_ms > MIN_MS else None
    apart = old_high < new_low or new_high < old_low
    verdict = "slower" if (change or 0.0) > 0 else "faster"
    if change is None or not apart or abs(change) <= MIN_CHANGE:
        verdict = "same"
    return Changed(name, old.median_ms, new.median_ms, old.noisy, new.noisy, change, verdict)


VERDICTS = {"slower": "slower", "faster": "faster", "same": "no clear change"}
MAX_NAMES = 3
"""The most names that a terminal lists of times that only one result has. It shows the number of the others."""


def columns(title: str, colour: str = "") -> list[Column[Changed]]:
    """The columns of changes. With `colour`, a page shows bars of that CSS class."""
    before = Column[Changed]("before ms", lambda row: _marked(row.before_ms, row.before_noisy))
    after = Column[Changed]("after ms", lambda row: _marked(row.after_ms, row.after_noisy))
    change = Column[Changed]("change", lambda row: row.change, CellFormat("{:+.1%}".format),
                             bar=(lambda row: (abs(row.change or 0.0), colour)) if colour else None)  # fmt: skip
    return [Column(title, lambda row: row.name, TEXT), before, after, change]


def _marked(ms: float, noisy: bool) -> str:
    return f"{'~' if noisy else ''}{milliseconds(ms)}"


STEPS = [*columns("whole step or training"), Column[Changed]("", lambda row: VERDICTS[row.verdict], TEXT)]
CONDITIONS: tuple[Column[tuple[str, tuple[Any, Any]]], ...] = (
    Column("condition", lambda row: row[0], TEXT),
    Column("before", lambda row: row[1][0], TEXT),
    Column("after", lambda row: row[1][1], TEXT),
)


@dataclass(frozen=True, kw_only=True)
class Compare(Result):
    """The differences between two results:

    - noise: a line for each reason to distrust a result;
    - protocol: the conditions that differ, as (before, after), by dotted key;
    - steps: all times of whole training steps;
    - slower, faster: the other times that changed, the largest factor first; same: the number of the others;
    - only_before, only_after: names of times that only one result has.
    """

    kind = "compare"
    before: str
    after: str
    noise: list[str]
    protocol: dict[str, tuple[Any, Any]]
    steps: list[Changed]
    slower: list[Changed]
    faster: list[Changed]
    same: int
    only_before: list[str]
    only_after: list[str]

    def view(self) -> View:
        changed = {"slower": self.slower, "faster": self.faster}
        parts: list[Part] = [
            *(Note(f"NOISY: {line}", where="text") for line in self.noise),
            *(Note(line, "page", notice=True) for line in self.noise),
            Note(f"before: {self.before}", where="text"),
            Note(f"after:  {self.after}", where="text"),
        ]
        if self.steps:
            parts.append(Section("Whole steps and trainings", [Table(STEPS, self.steps)]))
        numbers = [(kind, f"{len(found)}") for kind, found in changed.items()]
        parts.append(Tiles([*numbers, ("the same", f"{self.same}")]))
        what = "of the other times" if self.steps else "times"
        counts = f"{len(self.slower)} slower, {len(self.faster)} faster, {self.same} without a clear change"
        text = f"{what}: {counts} (over {MIN_CHANGE:.0%}, and 95% intervals that do not overlap)"
        parts += [GAP, Note(text)]
        for kind, found in changed.items():
            if found:
                parts.append(Section(kind.capitalize(), [Table(columns(kind, kind), found)]))
        for which, names in (("before", self.only_before), ("after", self.only_after)):
            if names:
                parts.append(_only(which, names))
        if self.protocol:
            table = Table(CONDITIONS, list(self.protocol.items()))
            parts.append(Section("Differences of the protocol", [table]))
        return View("Changed times", parts, about=f"before: {self.before} · after: {self.after}")


def _only(which: str, names: list[str]) -> Section:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    note = Note(f"only {which}: {', '.join(names[:MAX_NAMES])}{more}", where="text")
    listed = Picture(lambda: page.listed(names))
    return Section(f"Only {which}", [note, listed], folded=f"{len(names)} times")


def result(before: str, after: str) -> Compare:
    """The differences between the results in two files.

    For a time that did not change, two 95% intervals fail to overlap about once in two hundred cases. The intervals
    cover only the seconds in which the samples were taken, not later changes of the machine's load.

    Raises:
        AdtrainError: a file cannot be read or holds no such result, or they are of different kinds or devices.
    """
    old, new = read(before), read(after)
    for what, one, other in (
        ("kind", old.kind, new.kind),
        ("device", old.protocol.device_name, new.protocol.device_name),
    ):
        if one != other:
            raise AdtrainError(f"{before} is of {what} {one}, {after} of {other}; expected two results of one {what}")
    old_times, new_times = times(old), times(new)
    changes = [(time, changed(name, time, new_times[name])) for name, time in old_times.items() if name in new_times]
    parts = [change for time, change in changes if not time.whole]
    listed = {
        verdict: sorted((x for x in parts if x.verdict == verdict), key=lambda x: -x.factor)
        for verdict in ("slower", "faster", "same")
    }
    then, now = _conditions(old), _conditions(new)
    conditions = {key: (then.get(key), now.get(key)) for key in dict.fromkeys([*then, *now])}
    return Compare(
        before=before,
        after=after,
        noise=[f"{path}: {reason}" for path, found in ((before, old), (after, new)) for reason in _noise(found)],
        protocol={key: pair for key, pair in conditions.items() if pair[0] != pair[1]},
        steps=[change for time, change in changes if time.whole],
        slower=listed["slower"],
        faster=listed["faster"],
        same=len(listed["same"]),
        only_before=[name for name in old_times if name not in new_times],
        only_after=[name for name in new_times if name not in old_times],
    )


@dataclass(frozen=True)
class Kind:
    """The part of a result that tells its kind."""

    kind: Literal["ops", "candidates", "step", "scaling", "startup", "against", "devices", "race"]


def read(path: str | Path) -> TimedResult:
    """The result in a file of `adtrain bench --json-file`.

    Raises:
        AdtrainError: the file cannot be read, or is not such a result.
    """
    try:
        content = read_regular(path)
    except OSError as error:
        raise AdtrainError(f"{path}: cannot be read: {error.strerror}") from None
    return parse(records.parse_any(content, str(path)), str(path))


def parse(values: Any, where: str) -> TimedResult:
    """The result in JSON values; `where` is the file, for messages. Raises AdtrainError."""
    kind = records.check(Kind, values, where).kind
    found: TimedResult = records.check(KINDS[kind], values, where)
    return found


def times(result: TimedResult) -> dict[str, NamedTime]:
    """The times of a result by name; equal names are numbered."""
    seen: Counter[str] = Counter()
    found = {}
    for each in result.times():
        seen[each.name] += 1
        found[each.name if seen[each.name] == 1 else f"{each.name} #{seen[each.name]}"] = each
    return found


def _noise(result: TimedResult) -> list[str]:
    """Reasons to distrust the times of a result."""
    found = list(result.times())
    reasons = [warning] if (warning := result.protocol.busy) else []
    if noisy := sum(each.noisy for each in found):
        reasons.append(f"{noisy} of {len(found)} times have an interval wider than {NOISY:.0%} of the median")
    if exact := sum(each.low_ms is None for each in found):
        reasons.append(f"{exact} of {len(found)} times have no interval; each change over {MIN_CHANGE:.0%} is listed")
    return reasons


def _conditions(result: TimedResult) -> dict[str, Any]:
    """The conditions of a result: the leaves of its protocol, and what was measured, by dotted key."""
    found = {key: getattr(result, key) for key in ("config", "precision", "batch_size") if hasattr(result, key)}
    found |= {key: value for key, value in plain(result.protocol, sparse=True).items() if key not in MEASURED}
    return {dotted(path): value for path, value in records.leaves(found)}
