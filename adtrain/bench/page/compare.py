"""The page of the times that changed between two results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from markupsafe import Markup

from adtrain.bench.compare import MIN_CHANGE
from adtrain.bench.page import blocks
from adtrain.bench.timing.records import milliseconds
from adtrain.report import parts

COLUMNS = {"time": "text", "before ms": "", "after ms": "", "change": ""}
CONDITIONS = {"condition": "left", "before": "text", "after": "text"}


def title(result: Mapping[str, Any]) -> str:
    return "Changed times"


def body(result: Mapping[str, Any]) -> Iterable[Markup]:
    changes = {kind: result[kind] for kind in ("slower", "faster")}
    yield parts.tiles(
        [(kind, f"{len(found)}") for kind, found in changes.items()] + [("the same", f"{result['same']}")]
    )
    most = max((abs(each["change"]) for found in changes.values() for each in found), default=1.0)
    for kind, found in changes.items():
        rows = [
            [each["name"], milliseconds(each["before_ms"]), milliseconds(each["after_ms"]),
             parts.bar(abs(each["change"]) / most, f"{each['change']:+.1%}", kind)]
            for each in found
        ]  # fmt: skip
        if rows:
            yield parts.section(kind.capitalize(), parts.table(COLUMNS, rows))
    yield parts.note(f"Listed are changes of more than {MIN_CHANGE:.0%} and beyond both confidence intervals.")
    for where in ("before", "after"):
        if names := result[f"only_{where}"]:
            content = blocks.details(f"{len(names)} times", blocks.listed(names))
            yield parts.section(f"Only {where}", content)
    if result["protocol"]:
        rows = [[name, *map(str, pair)] for name, pair in result["protocol"].items()]
        yield parts.section("Differences of the protocol", parts.table(CONDITIONS, rows))
