"""The text of a comparison of two results: the times that changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from adtrain.bench.compare import MIN_CHANGE
from adtrain.bench.text.cells import wrapped
from adtrain.bench.timing.records import milliseconds
from adtrain.table import Column, render

COLUMNS = (Column("", text=True), Column("before ms"), Column("after ms"), Column("change"))

MAX_NAMES = 3
"""Of times that only one result has; of others only the number is shown."""


def lines(result: Mapping[str, Any], width: int) -> Iterator[str]:
    yield from wrapped([f"before: {result['before']}", f"after:  {result['after']}"], width)
    for key, (before, after) in result["protocol"].items():
        yield from wrapped([f"  {key}: {before} before, {after} after"], width)
    for kind in ("slower", "faster"):
        if changes := result[kind]:
            yield ""
            yield from render((Column(kind, text=True), *COLUMNS[1:]), [_cells(each) for each in changes], width)
    yield ""
    counts = f"{len(result['slower'])} slower and {len(result['faster'])} faster"
    significant = f"by more than {MIN_CHANGE:.0%} and beyond their confidence intervals"
    yield from wrapped([f"{counts} {significant}; {result['same']} not"], width)
    for which in ("before", "after"):
        if names := result[f"only_{which}"]:
            more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
            yield from wrapped([f"only {which}: {', '.join(names[:MAX_NAMES])}{more}"], width)


def _cells(change: Mapping[str, Any]) -> list[str]:
    return [
        change["name"],
        milliseconds(change["before_ms"]),
        milliseconds(change["after_ms"]),
        f"{change['change']:+.1%}",
    ]
