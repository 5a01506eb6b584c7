"""The page of operations over sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from adtrain.bench.page import cells, roofline
from adtrain.bench.page.roofline import Dot
from adtrain.report import parts
from adtrain.report.markup import Markup, html

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
        groups[row["phase"].split()[0]].append(_dot(row))
    yield parts.section("Roofline", roofline.figures(groups, peak, rows[0]["dtype"]))
    largest = {(row["op"], row["variant"], row["phase"]): row for row in sorted(rows, key=lambda row: row["n"])}
    ordered = [row for row in rows if largest[row["op"], row["variant"], row["phase"]] is row]
    yield parts.section("At the largest size", _table(ordered, minor="size"))
    yield parts.section(
        "At every size",
        html("<details><summary>{} times</summary>{}</details>\n", len(rows), _table(rows, minor="of peak")),
    )


def _dot(row: Mapping[str, Any]) -> Dot:
    ms = row["time"]["median_ms"]
    tooltip = f"{_name(row)} {row['size']}, {row['phase']}: {cells.rate(row['gflops_per_s'])} GFLOP/s, "
    return Dot(row["op"], f"{tooltip}{cells.share(row['of_roofline'])} of peak", row["flops"], row["bytes"], ms)


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['op']} {row['variant']}".strip()


def _table(rows: Iterable[Mapping[str, Any]], minor: str) -> Markup:
    """`minor` is the column that narrow screens leave out."""
    found = [
        [parts.breakable(_name(row), after="_"), row["size"], row["phase"],
         cells.time(row["time"]), cells.interval(row["time"]),
         cells.rate(row["gflops_per_s"]), cells.rate(row["gbytes_per_s"]),
         parts.bar(min(row["of_roofline"] or 0.0, 1.0), cells.share(row["of_roofline"]))]
        for row in rows
    ]  # fmt: skip
    return parts.table({**COLUMNS, minor: f"{COLUMNS[minor]} minor"}, found, "operations")
