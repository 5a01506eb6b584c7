"""The text of kernel candidates: a table for each problem."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from adtrain.backends.cuda.tuner.measure import distinct
from adtrain.bench.text.cells import per_second, protocol
from adtrain.table import Column, render

COLUMNS = (
    Column("kernel", text=True),
    Column("us"),
    Column("GFLOP/s", rank=1),
    Column("GB/s", rank=2),
    Column("of fastest", rank=3),
    Column("", text=True),
)


def lines(result: Mapping[str, Any], width: int) -> Iterator[str]:
    """Kernels are named without what all of a problem have in common. "rule" marks the choice without measurements."""
    yield from protocol(result, width)
    for row in result["candidates"]:
        found = row["candidates"]
        names = distinct([each["kernel"] for each in found])
        cells = [
            [name, f"{each['us']:.2f}", *map(per_second, (each["gflops_per_s"], each["gbytes_per_s"])),
             f"{found[0]['us'] / each['us']:.0%}", ", ".join(mark for mark in ("chosen", "rule") if each[mark])]
            for name, each in zip(names, found, strict=True)
        ]  # fmt: skip
        params = ", ".join(f"{name} {value}" for name, value in row["params"].items())
        yield from ("", f"{row['problem']}, {params}" if params else row["problem"], *render(COLUMNS, cells, width))
