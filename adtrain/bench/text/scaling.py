"""The text of the scaling of a config: a line for each number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from adtrain.bench.text.cells import wrapped
from adtrain.bench.timing.protocol import busy
from adtrain.table import Column, render

NUMBERS = ("ranks", "batch", "step us", "exchange us", "hidden", "efficiency")
COLUMNS = (Column("system", text=True), Column("scaling", text=True), *map(Column, NUMBERS))


def lines(result: Mapping[str, Any], width: int) -> Iterator[str]:
    title = f"{result['config']} on {result['device_name']}, gradients of {result['gradient_bytes']:,} bytes"
    yield from wrapped([title], width)
    yield ""
    yield from render(COLUMNS, [cells(point) for point in result["points"]], width)
    if warning := busy(result["protocol"]):
        yield ""
        yield from wrapped([warning], width)


def cells(point: Mapping[str, Any]) -> list[str]:
    """A point as cells of a table; also for the page."""
    hidden, exchange = point["hidden"], point["exchange_us"]
    return [
        point["system"],
        "weak" if point["weak"] else "strong",
        f"{point['ranks']}",
        f"{point['batch_size']:,}",
        f"{point['step_us']:,.1f}",
        f"{exchange:,.1f}" if exchange else "",
        "" if hidden is None else f"{max(0.0, min(1.0, hidden)):.0%}",
        f"{point['efficiency']:.1%}",
    ]
