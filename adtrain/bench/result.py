"""What the results of all kinds have in common: how they become JSON, and text for a terminal; their times, and remarks
about noise."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from statistics import median
from typing import Any, ClassVar, NamedTuple

from adtrain import table
from adtrain.bench.machine import Protocol
from adtrain.bench.sampling import MIN_COUNT, NOISY, Time, median_interval
from adtrain.bench.view import Note, Part, Section, Table, View
from adtrain.config.records import plain
from adtrain.text import Invocation


class NamedTime(NamedTuple):
    """A time of a result, named as in its tables.

    Attributes:
        low_ms, high_ms: the interval of the median; None where the result has no interval.
        whole: whether it is the time of a whole step or training, not of a part of it.
    """

    name: str
    median_ms: float
    low_ms: float | None
    high_ms: float | None
    whole: bool = False

    @property
    def ends(self) -> tuple[float, float]:
        """Those of the interval; a time without one counts as exact."""
        if self.low_ms is None or self.high_ms is None:
            return self.median_ms, self.median_ms
        return self.low_ms, self.high_ms

    @property
    def noisy(self) -> bool:
        low, high = self.ends
        return high - low > NOISY * self.median_ms


def named(name: str, time: Time, whole: bool = False) -> NamedTime:
    return NamedTime(name, time.median_ms, time.low_ms, time.high_ms, whole)


def of_samples(name: str, ms: Sequence[float]) -> NamedTime:
    """The time of a whole training or start, from its samples; few samples have no interval."""
    low, high = median_interval(ms) if len(ms) >= MIN_COUNT else (None, None)
    return NamedTime(name, median(ms), low, high, whole=True)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A result of `adtrain bench`. Its kind is the name of its command."""

    kind: ClassVar[str]

    def view(self) -> View:
        """What a terminal and a page show."""
        raise NotImplementedError

    @property
    def made(self) -> Invocation | None:
        """When and by which command it was measured, None if these are not known."""
        return None

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, **plain(self, sparse=True)}


@dataclass(frozen=True, kw_only=True)
class TimedResult(Result):
    """A result with times."""

    protocol: Protocol

    @property
    def made(self) -> Invocation:
        return Invocation(self.protocol.date, self.protocol.command)

    def times(self) -> Iterator[NamedTime]:
        """The times that are compared with those of another result."""
        raise NotImplementedError


def timings(node: Any) -> Iterator[Time]:
    """All times within a result."""
    if isinstance(node, Time):
        yield node
    elif is_dataclass(node):
        for field in fields(node):
            yield from timings(getattr(node, field.name))
    elif isinstance(node, Mapping):
        for value in node.values():
            yield from timings(value)
    elif isinstance(node, (list, tuple)):
        for each in node:
            yield from timings(each)


def outliers(result: TimedResult) -> str:
    """The number of outliers; empty for a result whose samples are not in it."""
    found = list(timings(result))
    samples, beyond = sum(x.samples for x in found), sum(len(x.outliers) for x in found)
    if not found:
        return ""
    return f"{beyond:,} of {samples:,} samples are outliers (beyond 1.5 interquartile ranges); none is removed"


def warnings(result: TimedResult) -> list[str]:
    """A line where times are noisy, and one where the machine was busy."""
    found = list(timings(result))
    lines = []
    if noisy := sum(x.noisy for x in found):
        lines.append(
            f"noisy machine: {noisy} of {len(found)} times, marked ~, have an interval wider than {NOISY:.0%} of the "
            "median; end other work and repeat"
        )
    return [*lines, warning] if (warning := result.protocol.busy) else lines


def text_lines(result: Result, width: int) -> list[str]:
    """The lines that show a result in `width` columns: protocol, parts, and remarks about noise."""
    lines = list(_wrapped(_protocol(result), width)) if isinstance(result, TimedResult) else []
    lines += part_lines(result.view().parts, width)
    if isinstance(result, TimedResult) and (remarks := [*filter(None, [outliers(result)]), *warnings(result)]):
        lines += ["", *_wrapped(remarks, width)]
    return lines


def part_lines(found: Iterable[Part], width: int) -> Iterator[str]:
    """The lines of the parts that a terminal shows. A table has an empty line before it."""
    for part in found:
        if part.where == "page":
            continue
        if isinstance(part, Note):
            yield from _wrapped([part.text], width) if part.text else [""]
        elif isinstance(part, Section):
            yield from part_lines(part.parts, width)
        elif isinstance(part, Table):
            yield ""
            yield from _wrapped(filter(None, [part.title]), width)
            shown = [column for column in part.columns if column.where != "page"]
            yield from table.render(shown, part.rows, width, part.sums)
            yield from _wrapped(part.notes, width)


def _wrapped(lines: Iterable[str], width: int) -> Iterator[str]:
    """The lines, broken where they are longer than `width`."""
    for line in lines:
        yield from textwrap.wrap(line, width, subsequent_indent="  ")


def _protocol(result: TimedResult) -> Iterator[str]:
    """Machine, versions, roofline, and of a result with intervals also sampling and clocks."""
    about = result.protocol
    versions = ", ".join(f"{name} {version}" for name, version in about.versions.items())
    commit = f" ({about.commit})" if about.commit else ""
    machine = f"{about.device}: {about.device_name}"
    if about.device == "cpu":
        machine += f", {about.cores} cores, {about.threads} threads; NumPy's {about.blas}"
    else:
        machine += f", {about.clock_mhz:.0f} MHz, driver {about.driver}"
    yield f"{machine}; {about.compiler}"
    yield f"{versions}{commit}; {about.date}"
    if peak := about.roofline:
        products = ", ".join(f"{name} {rate:,.0f}" for name, rate in peak.gflops_per_s.items())
        yield f"peak: copy {peak.gbytes_per_s:,.0f} GB/s; matrix products {products} GFLOP/s"
    if not any(timings(result)):
        return
    low, high = about.samples
    yield (
        f"medians of {low} to {high} samples, with their {about.confidence:.0%} confidence intervals; "
        f"clock of operations: {about.clock['operations']}; of steps: {about.clock['steps']}; "
        f"an empty run takes {about.overhead_ms * 1e6:.0f} ns"
    )
