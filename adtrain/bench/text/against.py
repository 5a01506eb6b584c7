"""The text of a comparison with other systems: a table for each config, or one for all operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from adtrain.bench.peers.jobs import COMPARED
from adtrain.bench.peers.systems import ADTRAIN
from adtrain.bench.text.cells import noise, protocol, time_cell, wrapped
from adtrain.table import Column, render

STEPS = (
    Column("system", text=True),
    Column("ms"),
    Column("ratio"),
    Column("95% interval", text=True),
    Column("loss error", rank=1),
    Column("MiB", rank=2),
)
OPERATIONS = (
    Column("operation", text=True),
    Column("size", text=True),
    Column("phase", rank=2, text=True),
    Column("system", text=True),
    Column("ms"),
    Column("ratio"),
    Column("95% interval", rank=1, text=True),
    Column("error", rank=3),
)


def lines(result: Mapping[str, Any], width: int) -> Iterator[str]:
    yield from protocol(result, width)
    ratio = "ratio: a system's time over adtrain's, round by round, in interleaved samples; above 1 adtrain is faster"
    yield from wrapped([ratio], width)
    for row in result.get("steps", ()):
        yield ""
        members = f", a step of all {row['members']:,} members" if "members" in row else ""
        what = f"{', '.join([row['config'], *row['overrides']])}: batch {row['batch_size']}{members}"
        yield from wrapped([what], width)
        same = f"the first {COMPARED} losses must equal adtrain's within a relative {row['tolerance']:g}"
        yield from wrapped([f"{row['precision']}, data on the device; {same}"], width)
        yield from render(STEPS, [_step_cells(row, system) for system in row["times"]], width)
        yield from wrapped(list(absent(row)), width)
    if operations := result.get("operations"):
        yield from wrapped(["error: relative error of the result, or of the worst gradient, against float64"], width)
        yield ""
        cells = [_operation_cells(row, system) for row in operations for system in row["times"]]
        yield from render(OPERATIONS, cells, width)
        yield from wrapped(list(dict.fromkeys(line for row in operations for line in absent(row))), width)
    yield from noise(result, width)


def _step_cells(row: Mapping[str, Any], system: str) -> list[str]:
    off, peak = row["off"][system], row["peak_mib"][system]
    return [system, time_cell(row["times"][system]), *_ratio(row, system), f"{off:.0e}", f"{peak:.0f}"]


def _operation_cells(row: Mapping[str, Any], system: str) -> list[str]:
    names = [row["op"], row["size"], row["phase"]] if system == ADTRAIN else ["", "", ""]
    return [*names, system, time_cell(row["times"][system]), *_ratio(row, system), f"{row['off'][system]:.0e}"]


def _ratio(row: Mapping[str, Any], system: str) -> tuple[str, str]:
    """The ratio and its interval, or "DIFFERENT" if the results differ too much."""
    if system in row["different"]:
        return "DIFFERENT", ""
    found = row["ratios"].get(system)
    return (f"{found['median']:.2f}", f"{found['low']:.2f} to {found['high']:.2f}") if found else ("", "")


def absent(row: Mapping[str, Any]) -> Iterator[str]:
    """Why systems were skipped or failed."""
    for how in ("skipped", "failed"):
        for system, reason in row[how].items():
            yield f"{system} {how}: {reason}"
