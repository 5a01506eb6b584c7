"""Numbers, kernels and the protocol of a result as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from adtrain.bench.timing.records import launch, milliseconds, remarks
from adtrain.table import Column

INTERVAL = Column("95% interval", rank=7)
RATES = (Column("GFLOP/s", rank=4), Column("GB/s", rank=5), Column("of peak", rank=3))
KERNELS = (Column("kernel", rank=6, text=True), Column("launch", rank=8, text=True))


def protocol(result: Mapping[str, Any], width: int) -> list[str]:
    """Machine, versions, roofline, sampling and clocks."""
    about = result["protocol"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    commit = f" ({about['commit']})" if about["commit"] else ""
    machine = f"{about['device']}: {about['device_name']}"
    if about["device"] == "cpu":
        machine += f", {about['cores']} cores, {about['threads']} threads; NumPy's {about['blas']}"
    else:
        machine += f", {about['clock_mhz']:.0f} MHz, driver {about['driver']}"
    lines = [f"{machine}; {about['compiler']}", f"{versions}{commit}; {about['date']}"]
    if peak := about["roofline"]:
        products = ", ".join(f"{name} {rate:,.0f}" for name, rate in peak["gflops_per_s"].items())
        lines.append(f"peak: copy {peak['gbytes_per_s']:,.0f} GB/s; matrix products {products} GFLOP/s")
    low, high = about["samples"]
    lines.append(
        f"medians of {low} to {high} samples, with their {about['confidence']:.0%} confidence intervals; "
        f"clock of operations: {about['clock']['operations']}; of steps: {about['clock']['steps']}; "
        f"an empty run takes {about['overhead_ms'] * 1e6:.0f} ns"
    )
    return wrapped(lines, width)


def wrapped(lines: Sequence[str], width: int) -> list[str]:
    """The lines, broken where they are longer than `width`."""
    return [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent="  ")]


def noise(result: Mapping[str, Any], width: int) -> list[str]:
    """An empty line, then the number of outliers and warnings of a noisy or busy machine."""
    return ["", *wrapped(remarks(result), width)]


def time_cell(record: Mapping[str, Any] | None) -> str:
    """The median, marked with "~" if it is noisy; empty without a record."""
    return "" if record is None else f"{'~' if record['noisy'] else ''}{milliseconds(record['median_ms'])}"


def range_cell(record: Mapping[str, Any], low: str = "low", high: str = "high") -> str:
    """A range such as "0.2062-0.2066", by default the confidence interval of the median."""
    return f"{milliseconds(record[f'{low}_ms'])}-{milliseconds(record[f'{high}_ms'])}"


def rate_cells(row: Mapping[str, Any]) -> list[str]:
    share = row["of_roofline"]
    of_peak = "cached" if row["from_cache"] else f"{share:.0%}" if share else ""
    return [per_second(row["gflops_per_s"]), per_second(row["gbytes_per_s"]), of_peak]


def cache_note(rows: Iterable[Mapping[str, Any]], width: int) -> list[str]:
    """What "cached" means, if any of the rows has it."""
    note = "cached: the bytes came faster than the memory can deliver them, so from a cache"
    return wrapped([note], width) if any(row["from_cache"] for row in rows) else []


def per_second(billions: float | None) -> str:
    return f"{billions:.2f}" if billions else ""


def kernel_cells(kernels: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names and launches, each distinct one once."""
    names = dict.fromkeys(kernel["name"] for kernel in kernels)
    shapes = dict.fromkeys(launch(kernel["launch"]) for kernel in kernels)
    return [" + ".join(names), " + ".join(shapes)]
