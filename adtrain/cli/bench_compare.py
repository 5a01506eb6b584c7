"""`adtrain bench --compare A B`: what moved between two results, beyond noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from adtrain.bench.compare import LEAST, Comparison, Move, compare, read
from adtrain.bench.timing.protocol import busy
from adtrain.bench.timing.records import milliseconds
from adtrain.cli.bench_report import wrapped
from adtrain.cli.table import Column, render, terminal_width

COLUMNS = (Column("", text=True), Column("before ms"), Column("after ms"), Column("change"))
SHOWN = 3
"""Names of times that only one result has, before it says how many more there are."""


def run(paths: tuple[str, str]) -> tuple[dict[str, Any], list[str]]:
    """The comparison, and the lines that show it."""
    results = read(paths[0]), read(paths[1])
    found = compare(*results, paths)
    moves = {name: [_record(move) for move in getattr(found, name)] for name in ("slower", "faster")}
    result = {"kind": "compare", "before": paths[0], "after": paths[1], **found._asdict(), **moves}
    warnings = [
        f"{path}: {line}" for path, each in zip(paths, results, strict=True) if (line := busy(each["protocol"]))
    ]
    return result, [*report(found, paths), *wrapped(warnings)]


def report(found: Comparison, paths: tuple[str, str]) -> Iterator[str]:
    """What became slower, what faster, and what the two were measured with."""
    yield from wrapped([f"before: {paths[0]}", f"after:  {paths[1]}"])
    for key, (before, after) in found.protocol.items():
        yield from wrapped([f"  {key}: {before} before, {after} after"])
    for title, moves in (("slower", found.slower), ("faster", found.faster)):
        if moves:
            yield ""
            columns = (Column(title, text=True), *COLUMNS[1:])
            yield from render(columns, [_cells(move) for move in moves], terminal_width())
    yield ""
    yield from wrapped(
        [
            f"{len(found.slower)} slower and {len(found.faster)} faster by more than {LEAST:.0%} and beyond their "
            f"confidence intervals; {found.same} not"
        ]
    )
    for where, names in (("before", found.only_before), ("after", found.only_after)):
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            yield from wrapped([f"only {where}: {', '.join(names[:SHOWN])}{more}"])


def _cells(move: Move) -> list[str]:
    return [move.name, milliseconds(move.before_ms), milliseconds(move.after_ms), f"{move.change:+.1%}"]


def _record(move: Move) -> dict[str, Any]:
    return {**move._asdict(), "change": move.change}
