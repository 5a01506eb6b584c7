"""The text of operations over sizes: a line for each operation, size and phase."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from adtrain.bench.text.cells import (
    INTERVAL,
    KERNELS,
    RATES,
    cache_note,
    kernel_cells,
    noise,
    protocol,
    range_cell,
    rate_cells,
    time_cell,
)
from adtrain.table import Column, render

COLUMNS = (
    Column("operation", text=True),
    Column("size", text=True),
    Column("phase", rank=1, text=True),
    Column("ms"),
    INTERVAL,
    Column("p20-p80", rank=9),
    *RATES,
    *KERNELS,
)


def lines(result: Mapping[str, Any], width: int) -> Iterator[str]:
    cells = [
        [f"{row['op']} {row['variant']}".strip(), row["size"], row["phase"], time_cell(row["time"]),
         range_cell(row["time"]), range_cell(row["time"], "p20", "p80"), *rate_cells(row),
         *kernel_cells(row["kernels"])]
        for row in result["ops"]
    ]  # fmt: skip
    yield from protocol(result, width)
    yield ""
    yield from render(COLUMNS, cells, width)
    yield from cache_note(result["ops"], width)
    yield from noise(result, width)
