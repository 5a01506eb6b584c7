"""The page of kernel candidates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from markupsafe import Markup

from adtrain.bench.page import cells
from adtrain.report import parts

COLUMNS = {"kernel": "text", "µs": "", "GFLOP/s": "minor", "GB/s": "minor", "": "left"}


def title(result: Mapping[str, Any]) -> str:
    return "Kernel candidates"


def body(result: Mapping[str, Any]) -> Iterable[Markup]:
    """A section for each problem, the fastest kernel first."""
    for row in result["candidates"]:
        found = row["candidates"]
        slowest = max(each["us"] for each in found)
        rows = [
            [each["kernel"], parts.bar(each["us"] / slowest, f"{each['us']:.2f}"),
             cells.rate(each["gflops_per_s"]), cells.rate(each["gbytes_per_s"]),
             ", ".join(mark for mark in ("chosen", "rule") if each[mark])]
            for each in found
        ]  # fmt: skip
        params = ", ".join(f"{name} {value}" for name, value in row["params"].items())
        note = parts.note(params) if params else ""
        yield parts.section(row["problem"], parts.table(COLUMNS, rows, "operations") + note)
