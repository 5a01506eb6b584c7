"""The text of a comparison of two results: whole steps first, then the other times that changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from adtrain.bench.compare import MIN_CHANGE
from adtrain.bench.text.cells import wrapped
from adtrain.bench.timing.records import milliseconds
from adtrain.table import Column, render

TIMES = (Column("before ms"), Column("after ms"), Column("change"))
STEPS = (Column("whole step", text=True), *TIMES, Column("", text=True))
CONDITIONS = (Column("condition", text=True), Column("before", text=True), Column("after", text=True))

VERDICTS = {"slower": "slower", "faster": "faster", "same": "no clear change"}

MAX_NAMES = 3
"""Of times that only one result has; of others only the number is shown."""


def lines(result: Mapping[str, Any], width: int) -> Iterator[str]:
    yield from wrapped([f"NOISY: {line}" for line in result["noise"]], width)
    yield from wrapped([f"before: {result['before']}", f"after:  {result['after']}"], width)
    if steps := result["steps"]:
        yield ""
        yield from render(STEPS, [[*_cells(each), VERDICTS[each["verdict"]]] for each in steps], width)
    yield ""
    what = "of the other times" if steps else "times"
    counts = f"{len(result['slower'])} slower, {len(result['faster'])} faster, {result['same']} without a clear change"
    yield from wrapped([f"{what}: {counts} (over {MIN_CHANGE:.0%}, and 95% intervals that do not overlap)"], width)
    for kind in ("slower", "faster"):
        if changes := result[kind]:
            yield ""
            yield from render((Column(kind, text=True), *TIMES), [_cells(each) for each in changes], width)
    for which in ("before", "after"):
        if names := result[f"only_{which}"]:
            more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
            yield from wrapped([f"only {which}: {', '.join(names[:MAX_NAMES])}{more}"], width)
    if differing := result["protocol"]:
        yield ""
        rows = [[key, *("" if value is None else str(value) for value in pair)] for key, pair in differing.items()]
        yield from render(CONDITIONS, rows, width)


def _cells(change: Mapping[str, Any]) -> list[str]:
    """Name, times (noisy ones are marked with "~") and change."""
    shown = [f"{'~' if change[f'{w}_noisy'] else ''}{milliseconds(change[f'{w}_ms'])}" for w in ("before", "after")]
    return [change["name"], *shown, "" if change["change"] is None else f"{change['change']:+.1%}"]
