"""`adtrain bench --against`: the same configs or operations in other systems, in turns, and the ratios of times."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import click

from adtrain import config, training
from adtrain.bench.peers import comparison, op_cases
from adtrain.bench.peers.catalogue import OURS, PEERS, Choice, chosen
from adtrain.bench.peers.comparison import Found
from adtrain.bench.peers.op_cases import OpCase
from adtrain.bench.peers.sides import started
from adtrain.bench.peers.steps import COMPARED
from adtrain.bench.timing import protocol as about
from adtrain.bench.timing.machine import usable_cores
from adtrain.cli.bench_report import noise, protocol, time_cell, wrapped
from adtrain.cli.op_option import select_ops
from adtrain.cli.options import progress
from adtrain.cli.table import Column, render, terminal_width

STEPS = (
    Column("side", text=True),
    Column("ms"),
    Column("ratio"),
    Column("95% interval", text=True),
    Column("losses off", rank=1),
    Column("MiB", rank=2),
)
OPERATIONS = (
    Column("operation", text=True),
    Column("size", text=True),
    Column("phase", rank=2, text=True),
    Column("side", text=True),
    Column("ms"),
    Column("ratio"),
    Column("95% interval", rank=1, text=True),
    Column("error", rank=3),
)


def run(
    configs: Sequence[str],
    overrides: Sequence[str],
    names: Sequence[str],
    device: str,
    against: Sequence[str],
    autotune: str,
) -> tuple[dict[str, Any], list[str]]:
    """The result of comparing the training step of each config, or else operations, all or those named; and the lines
    that show it.

    Raises:
        OptionError, UsageError: there is no such peer, or no such operation among those that are compared.
        ConfigError, DataError: a config is wrong; nothing has been started then.
        SideFailed: adtrain's own side fails.
    """
    choice = chosen(against, device, operations=not configs)
    rows = (
        {"steps": _steps(configs, [*overrides, "schedule=constant"], device, choice, autotune)}
        if configs
        else {"operations": _operations(select_ops(op_cases.cases(device), names), device, choice, autotune)}
    )
    measured_by = {
        **about.protocol(device),
        "threads": threads(),
        "samples": [comparison.MIN_ROUNDS, comparison.MAX_ROUNDS],
        "min_sample_ms": (comparison.STEPS if configs else comparison.OPERATIONS).sample * 1e3,
        "clock": dict.fromkeys(("operations", "steps"), "each side's host's, until the device has finished"),
    }
    measured_by["versions"] |= {package: version(package) for package in _packages(choice)}
    result = {"kind": "against", "protocol": measured_by, **rows}
    return result, list(report(result, terminal_width()))


def _steps(
    names: Sequence[str], overrides: Sequence[str], device: str, choice: Choice, autotune: str
) -> list[dict[str, Any]]:
    configs = []
    for name in names:
        cfg = config.load(name, overrides)
        training.check_precision(cfg, device)
        configs.append((name, cfg, training.prepare(cfg).full_batch))
    rows = []
    for name, cfg, batch in configs:
        precision = cfg.training.precision
        progress(f"bench: {cfg.name} in {', '.join([OURS, *choice.taking_part])}: getting ready, then taking turns")
        with started([OURS, *choice.taking_part], device, threads(), autotune) as sides:
            found = comparison.compare_steps(sides, name, overrides, precision)
        what = {"config": cfg.name, "overrides": list(overrides), "batch_size": batch, "precision": precision}
        rows.append({**what, "tolerance": comparison.LOSS_TOLERANCE[precision], **_record(found, choice)})
    return rows


def _operations(cases: Sequence[OpCase], device: str, choice: Choice, autotune: str) -> list[dict[str, Any]]:
    rows = []
    with started([OURS, *choice.taking_part], device, threads(), autotune) as sides:
        for i, case in enumerate(cases, 1):
            progress(f"bench: {case.name} ({i} of {len(cases)})")
            for phase in case.phases:
                found = comparison.compare_operation(sides, case, phase)
                what = {"op": case.op, "size": case.size, "phase": phase, "flops": case.flops(phase)}
                tolerance = comparison.OPERATION_TOLERANCE[case.precision]
                how = {"precision": case.precision, "tolerance": tolerance}
                rows.append({**what, **how, **_record(found, choice)})
    return rows


def threads() -> int:
    """Threads, and cores, of each side: what OMP_NUM_THREADS says, else as many as this process may use."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) else usable_cores() or 1


def report(result: Mapping[str, Any], width: int) -> Iterator[str]:
    """The lines of a table for each config, or of one for all operations."""
    yield from protocol(result)
    yield from wrapped(
        ["ratio: a side's time over adtrain's, round by round, in processes that take turns; above 1 adtrain is faster"]
    )
    for row in result.get("steps", ()):
        yield ""
        yield from wrapped([f"{', '.join([row['config'], *row['overrides']])}: batch {row['batch_size']}"])
        same = f"the first {COMPARED} losses must be adtrain's to a relative {row['tolerance']:g}"
        yield from wrapped([f"{row['precision']}, data on the device; {same}"])
        yield from render(STEPS, [_step_cells(row, side) for side in row["times"]], width)
        yield from wrapped(list(_absent(row)))
    if operations := result.get("operations"):
        yield from wrapped(["error: of the result, or the worst gradient, to float64"])
        yield ""
        cells = [_operation_cells(row, side) for row in operations for side in row["times"]]
        yield from render(OPERATIONS, cells, width)
        yield from wrapped(list(dict.fromkeys(line for row in operations for line in _absent(row))))
    yield from noise(result)


def is_different(result: Mapping[str, Any]) -> bool:
    """Whether a side computes something else."""
    return any(row["different"] for row in result.get("steps", result.get("operations")))


def _record(found: Found, choice: Choice) -> dict[str, Any]:
    record = found.record()
    return {**record, "skipped": {**choice.skipped, **record["skipped"]}}


def _packages(choice: Choice) -> set[str]:
    return {peer.package for peer in PEERS if peer.name in choice.taking_part}


def _step_cells(row: Mapping[str, Any], side: str) -> list[str]:
    off, peak = row["off"][side], row["peak_mib"][side]
    return [side, time_cell(row["times"][side]), *_ratio(row, side), f"{off:.0e}", f"{peak:.0f}"]


def _operation_cells(row: Mapping[str, Any], side: str) -> list[str]:
    names = [row["op"], row["size"], row["phase"]] if side == OURS else ["", "", ""]
    return [*names, side, time_cell(row["times"][side]), *_ratio(row, side), f"{row['off'][side]:.0e}"]


def _ratio(row: Mapping[str, Any], side: str) -> tuple[str, str]:
    """The ratio and its interval; where the side computes something else, that."""
    if side in row["different"]:
        return "DIFFERENT", ""
    found = row["ratios"].get(side)
    return (f"{found['median']:.2f}", f"{found['low']:.2f} to {found['high']:.2f}") if found else ("", "")


def _absent(row: Mapping[str, Any]) -> Iterator[str]:
    for how in ("skipped", "failed"):
        for side, reason in row[how].items():
            yield f"{side} {how}: {reason}"


def against_option(function: Any) -> Any:
    """`--against NAME,...`, received as a tuple of names."""

    def split(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
        return tuple(name.strip() for name in value.split(",")) if value is not None else ()

    return click.option(
        "--against",
        metavar="PEER,...",
        callback=split,
        help="Compare with torch, jax or numpy, or with one form of them: torch-eager, torch-compile, torch-graph, "
        "jax-jit, jax-scan.",
    )(function)
