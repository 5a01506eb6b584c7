"""A result of `adtrain bench` as one HTML file without scripts or external files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from markupsafe import Markup

from adtrain import templates
from adtrain.bench.cells import interval
from adtrain.bench.page import charts
from adtrain.bench.result import Result, TimedResult, outliers, timings, warnings
from adtrain.bench.timing.protocol import Protocol
from adtrain.bench.timing.sampling import Time
from adtrain.bench.view import MINOR_RANK, Column, Note, Part, Picture, Section, Table, Tiles
from adtrain.templates import environment


def render(result: Result) -> str:
    """The page of a result."""
    view, timed = result.view(), result if isinstance(result, TimedResult) else None
    return environment().get_template("bench.html.j2").render(
        title=f"adtrain bench: {view.title}",
        heading=view.title,
        about=view.about or (_about(timed.protocol) if timed else ""),
        made=result.made,
        notices=warnings(timed) if timed else [],
        body=drawn(view.parts),
        protocol=dict(_protocol(timed)) if timed else None,
    )  # fmt: skip


def drawn(found: Iterable[Part]) -> Iterator[Markup]:
    """The parts that a page shows."""
    for part in found:
        if part.where == "text":
            continue
        match part:
            case Note():
                yield (templates.notice if part.notice else templates.note)(part.text)
            case Tiles():
                yield templates.tiles(part.found)
            case Picture():
                yield part.draw()
            case Table():
                yield table(part)
            case Section():
                content = Markup().join(drawn(part.parts))
                yield templates.section(part.title, charts.details(part.folded, content) if part.folded else content)


def table(found: Table[Any]) -> Markup:
    """The table with its notes."""
    shown = [column for column in found.columns if column.where != "text"]
    largest = [max((column.bar(row)[0] for row in found.rows), default=0.0) if column.bar else 0.0 for column in shown]
    rows = [[_cell(column, row, most) for column, most in zip(shown, largest, strict=True)] for row in found.rows]
    if any(column.foot for column in shown):
        rows.append([column.foot() if column.foot else Markup() for column in shown])
    titles = _distinct([column.title for column in shown])
    classes = dict(zip(titles, map(_classes, shown), strict=True))
    return templates.table(classes, rows, found.kind) + Markup().join(map(templates.note, found.notes))


def _cell(column: Column[Any], row: Any, largest: float) -> str:
    if column.drawn:
        return column.drawn(row)
    value = column.of(row)
    text: str = "" if value is None else column.format.write(value)
    if isinstance(value, Time) and text == column.text(row) and column.format.write is not interval:
        text = charts.hint(text, f"95% interval {interval(value)} ms; {value.samples} samples of {value.repeats}")
    elif column.format.breaks:
        text = templates.breakable(text.split(column.format.breaks), column.format.breaks)
    if column.bar:
        length, kind = column.bar(row)
        text = templates.bar(length / largest if largest else 0.0, text, kind)
    return text


def _classes(column: Column[Any]) -> str:
    if column.drawn:
        return "lane-cell"
    classes = ["text word"] if column.format.left else []
    return " ".join([*classes, "minor"] if column.minor or column.rank >= MINOR_RANK else classes)


def _distinct(titles: Sequence[str]) -> list[str]:
    """The titles, with spaces after those that occur several times: they are keys of the template's mapping."""
    found: list[str] = []
    for title in titles:
        while title in found:
            title += " "
        found.append(title)
    return found


def _about(protocol: Protocol) -> str:
    commit = f"commit {protocol.commit}" if protocol.commit else f"adtrain {protocol.versions['adtrain']}"
    return " · ".join([protocol.device, protocol.device_name, commit])


def _protocol(result: TimedResult) -> Iterator[tuple[str, str]]:
    """Names and values of the protocol's entries."""
    about = result.protocol
    for name in ("commit", "device", "device_name"):
        if value := getattr(about, name):
            yield name.replace("_", " "), value
    for device, name in (about.devices or {}).items():
        yield f"device {device}", name
    yield "cores, threads", f"{about.cores}, {about.threads}"
    if about.load is not None:
        yield "load before", f"{about.load:.2f}"
    if about.clock_mhz:
        yield "driver", about.driver or ""
        yield "clocks", f"{about.clock_mhz:.0f} MHz, memory {about.memory_clock_mhz:.0f} MHz"
    yield "compiler", about.compiler or ""
    if about.naive:
        yield "naive loops", about.naive
    yield "NumPy's BLAS", f"{about.blas}, {about.blas_threads} threads"
    yield "versions", ", ".join(f"{name} {version}" for name, version in about.versions.items())
    for what, clock in about.clock.items():
        yield f"clock of {what}", clock
    if any(timings(result)):
        low, high = about.samples
        samples = f"{low} to {high} of at least {about.min_sample_ms:g} ms"
        yield "samples", f"{samples}; intervals of {about.confidence:.0%} confidence"
    yield "an empty run", f"{about.overhead_ms * 1e6:.0f} ns"
    if peak := about.roofline:
        yield "copy", f"{peak.gbytes_per_s:,.1f} GB/s"
        yield "matrix products", ", ".join(f"{name} {x:,.1f} GFLOP/s" for name, x in peak.gflops_per_s.items())
    if remark := outliers(result):
        yield "outliers", remark
