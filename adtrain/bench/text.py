"""A result of `adtrain bench` as text tables for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from adtrain import table
from adtrain.bench.result import Result, TimedResult, outliers, timings, warnings
from adtrain.bench.view import Note, Part, Section, Table


def render(result: Result, width: int) -> list[str]:
    """The lines that show a result in `width` columns: protocol, parts, and remarks about noise."""
    lines = list(wrapped(_protocol(result), width)) if isinstance(result, TimedResult) else []
    lines += parts(result.view().parts, width)
    if isinstance(result, TimedResult) and (remarks := [*filter(None, [outliers(result)]), *warnings(result)]):
        lines += ["", *wrapped(remarks, width)]
    return lines


def parts(found: Iterable[Part], width: int) -> Iterator[str]:
    """The lines of the parts that a terminal shows. A table has an empty line before it."""
    for part in found:
        if part.where == "page":
            continue
        if isinstance(part, Note):
            yield from wrapped([part.text], width) if part.text else [""]
        elif isinstance(part, Section):
            yield from parts(part.parts, width)
        elif isinstance(part, Table):
            yield ""
            yield from wrapped(filter(None, [part.title]), width)
            shown = [column for column in part.columns if column.where != "page"]
            yield from table.render(shown, part.rows, width, part.sums)
            yield from wrapped(part.notes, width)


def wrapped(lines: Iterable[str], width: int) -> Iterator[str]:
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
