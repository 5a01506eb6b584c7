"""`adtrain bench` without a config: operations over sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from adtrain.bench.ops import sweep
from adtrain.bench.ops.sweep import BenchRow
from adtrain.bench.ops.table import Bench
from adtrain.bench.timing import protocol as about
from adtrain.cli.bench_report import (
    INTERVAL,
    KERNELS,
    RATES,
    kernel_cells,
    known_roofline,
    noise,
    protocol,
    range_cell,
    rate_cells,
    time_cell,
)
from adtrain.cli.options import progress
from adtrain.cli.table import Column, render, terminal_width
from adtrain.core.errors import AdtrainError, DTypeError

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


def run(
    benches: Sequence[Bench], sizes: Sequence[int] | None, dtype: str, device: str, strict: bool
) -> tuple[dict[str, Any], list[str]]:
    """The result, and the lines that show it.

    Args:
        strict: an operation that does not take `dtype` is an error; otherwise it is left out, and that is said.

    Raises:
        AdtrainError: no operation takes it.
    """
    peak = known_roofline(device)
    result: dict[str, Any] = {"kind": "ops", "protocol": about.protocol(device, peak, sweep.MIN_SAMPLE_MS)}
    problems = [(each, n) for each in benches for n in sizes or each.ladder[device]]
    progress(f"bench: timing {len(problems)} operations and sizes in {dtype}, forward and backward")
    rows, refused = list[BenchRow](), dict[str, str]()
    for each, n in tqdm(problems, desc="bench", unit=" sizes", disable=None, leave=False):
        if each.op in refused:
            continue
        try:
            rows += sweep.rows(each, n, dtype, device)
        except DTypeError as error:
            refused[each.op] = str(error)
            if strict:
                raise
    if refused:
        progress(f"bench: {len(refused)} operations do not take {dtype} and are left out: {', '.join(refused)}")
    if not rows:
        raise AdtrainError(f"--dtype {dtype}: none of these operations takes it")
    result["ops"] = [row.record(peak) for row in rows]
    return result, list(report(result))


def report(result: Mapping[str, Any]) -> Iterator[str]:
    """A line for each operation, size and phase."""
    cells = [
        [f"{row['op']} {row['variant']}".strip(), row["size"], row["phase"], time_cell(row["time"]),
         range_cell(row["time"]), range_cell(row["time"], "p20", "p80"), *rate_cells(row),
         *kernel_cells(row["kernels"])]
        for row in result["ops"]
    ]  # fmt: skip
    yield from protocol(result)
    yield ""
    yield from render(COLUMNS, cells, terminal_width())
    yield from noise(result)
