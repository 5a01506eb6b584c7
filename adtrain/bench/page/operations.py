"""The page of operations over sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from adtrain.bench.page import blocks, cells, roofline
from adtrain.bench.page.curves import Line, figure
from adtrain.bench.page.roofline import Dot
from adtrain.report import parts

COLUMNS = {
    "operation": "text",
    "size": "text",
    "phase": "left",
    "ms": "",
    "95% interval": "minor",
    "GFLOP/s": "minor",
    "GB/s": "minor",
    "of peak": "",
}
KINDS = ("forward", "backward", "update", "series-4", "series-6")
MAX_CURVES = 12
RATES = {"GFLOP/s": "gflops_per_s", "GB/s": "gbytes_per_s"}


def title(result: Mapping[str, Any]) -> str:
    return "Operations"


def body(result: Mapping[str, Any]) -> Iterable[Markup]:
    rows, peak = result["ops"], result["protocol"]["roofline"]
    best = {unit: max((row[field] or 0.0 for row in rows), default=0.0) for unit, field in RATES.items()}
    yield parts.tiles(
        [
            ("operations", f"{len({row['op'] for row in rows})}"),
            ("times", f"{len(rows)}"),
            *((f"most {unit}", f"{most:,.1f}") for unit, most in best.items()),
        ]
    )
    groups: dict[str, list[Dot]] = {"forward": [], "backward": []}
    for row in rows:
        groups[row["phase"].split()[0]].append(_dot(row, peak))
    yield parts.section("Roofline", roofline.figures(groups, peak, rows[0]["dtype"]))
    by_size: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["n"]):
        by_size.setdefault((row["op"], row["variant"], row["phase"]), []).append(row)
    largest = sorted((found[-1] for found in by_size.values()), key=lambda row: row["of_roofline"] or float("inf"))
    note = parts.note("The operations furthest from the peak come first.")
    yield parts.section("At the largest size", _table(largest, peak, minor="size") + note)
    if drawn := list(_curves(largest, by_size)):
        shown, hidden = blocks.figures(drawn[:MAX_CURVES]), drawn[MAX_CURVES:]
        more = blocks.details(f"{len(hidden)} more operations", blocks.figures(hidden)) if hidden else Markup()
        yield parts.section("Share of the peak over the size", shown + more)
    every = blocks.details(f"{len(rows)} times", _table(rows, peak, minor="of peak"))
    yield parts.section("At every size", every)


def _curves(
    order: Iterable[Mapping[str, Any]], by_size: Mapping[tuple[str, str, str], Sequence[Mapping[str, Any]]]
) -> Iterator[Markup]:
    """A chart for each operation that was timed at several sizes, with a line for each phase."""
    for name, variant in dict.fromkeys((row["op"], row["variant"]) for row in order):
        lines: list[Line] = []
        for (op, other, phase), rows in by_size.items():
            points = [(row["n"], row["of_roofline"] * 100) for row in rows if row["of_roofline"]]
            if (op, other) == (name, variant) and len(points) > 1:
                lines.append(Line(phase, KINDS[len(lines) % len(KINDS)], points))
        if lines:
            yield figure(f"{name} {variant}".strip(), "n", "% of peak", lines, level=100.0)


def _dot(row: Mapping[str, Any], peak: Mapping[str, Any]) -> Dot:
    ms = row["time"]["median_ms"]
    tooltip = f"{_name(row)} {row['size']}, {row['phase']}: {cells.rate(row['gflops_per_s'])} GFLOP/s, "
    return Dot(row["op"], tooltip + cells.of_peak(row, peak, " of peak"), row["flops"], row["bytes"], ms)


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['op']} {row['variant']}".strip()


def _table(rows: Iterable[Mapping[str, Any]], peak: Mapping[str, Any], minor: str) -> Markup:
    """`minor` is the column that narrow screens leave out."""
    found = [
        [parts.breakable(_name(row).split("_"), "_"), row["size"], row["phase"],
         cells.time(row["time"]), cells.interval(row["time"]),
         cells.rate(row["gflops_per_s"]), cells.rate(row["gbytes_per_s"]),
         parts.bar(min(row["of_roofline"] or 0.0, 1.0), cells.of_peak(row, peak))]
        for row in rows
    ]  # fmt: skip
    return parts.table({**COLUMNS, minor: f"{COLUMNS[minor]} minor"}, found, "operations")
