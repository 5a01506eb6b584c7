"""The page of what moved between two results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from adtrain.bench.compare import LEAST
from adtrain.bench.timing.records import milliseconds
from adtrain.report import parts

COLUMNS = {"time": "text", "before ms": "", "after ms": "", "change": ""}
CONDITIONS = {"condition": "left", "before": "text", "after": "text"}


def title(result: Mapping[str, Any]) -> str:
    return "What moved"


def body(result: Mapping[str, Any]) -> Iterable[str]:
    moves = {kind: result[kind] for kind in ("slower", "faster")}
    yield parts.tiles([(kind, f"{len(found)}") for kind, found in moves.items()] + [("the same", f"{result['same']}")])
    most = max((abs(move["change"]) for found in moves.values() for move in found), default=1.0)
    for kind, found in moves.items():
        rows = [
            [escape(move["name"]), milliseconds(move["before_ms"]), milliseconds(move["after_ms"]),
             parts.bar(abs(move["change"]) / most, f"{move['change']:+.1%}", kind)]
            for move in found
        ]  # fmt: skip
        if rows:
            yield parts.section(kind.capitalize(), parts.table(COLUMNS, rows))
    yield parts.note(f"Moved is what changed by more than {LEAST:.0%} and beyond both confidence intervals.")
    for where in ("before", "after"):
        if names := result[f"only_{where}"]:
            listed = "".join(f"<li>{escape(name)}</li>" for name in names)
            content = f"<details><summary>{len(names)} that the other lacks</summary><ul>{listed}</ul></details>\n"
            yield parts.section(f"Only {where}", content)
    if result["protocol"]:
        rows = [[escape(name), *(escape(str(x)) for x in pair)] for name, pair in result["protocol"].items()]
        yield parts.section("Measured otherwise", parts.table(CONDITIONS, rows))
