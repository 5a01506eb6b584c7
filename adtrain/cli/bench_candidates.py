"""`adtrain bench --candidates`: what each kernel that a GPU has for an operation reaches at the standard sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import click

from adtrain.backends.cuda.lower import fastest
from adtrain.backends.cuda.tuner.autotune import Mode, tuning_problems
from adtrain.backends.cuda.tuner.measure import described, distinct
from adtrain.bench.ops.sweep import phases, sample
from adtrain.bench.ops.table import Bench
from adtrain.bench.steps.profile import rate
from adtrain.bench.timing.protocol import protocol
from adtrain.cli import bench_report
from adtrain.cli.options import progress
from adtrain.cli.table import Column, render, terminal_width
from adtrain.core.backend import backend
from adtrain.core.program import Equation
from adtrain.core.staging import stage

COLUMNS = (
    Column("kernel", text=True),
    Column("us"),
    Column("GFLOP/s", rank=1),
    Column("GB/s", rank=2),
    Column("of fastest", rank=3),
    Column("", text=True),
)


def run(benches: Sequence[Bench], sizes: Sequence[int] | None) -> tuple[dict[str, Any], list[str]]:
    """The result, and the lines that show it."""
    found = measured(benches, sizes)
    result = {"kind": "candidates", "protocol": protocol("gpu"), "candidates": found}
    return result, report(result, terminal_width())


def measured(benches: Sequence[Bench], sizes: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """For each distinct problem of the benches its candidates, the fastest one first.

    Args:
        sizes: by default the standard ones.

    Raises:
        UsageError: there is no choice for any of them.
    """
    tuner = cast(Any, backend("gpu")).tuner
    equations: list[Equation] = []
    for each in benches:
        for n in sizes or each.ladder["gpu"]:
            for f, args in phases(each, sample(each, n, device="gpu")).values():
                equations += stage(f).program(*args).equations
    problems = list(tuning_problems(tuner.lowering, equations))
    if not problems:
        raise click.UsageError("--candidates: there is one kernel for each of these operations")
    progress(f"bench: measuring the candidates of {len(problems)} problems")
    rows = []
    for contest, times in tuner.times(problems, measure=True):
        equation, rule = contest.equation, contest.labels[0]
        cost = equation.primitive.cost([v.type for v in equation.inputs], equation.params)
        taken = rule if tuner.mode is Mode.OFF else fastest(contest.labels, times)
        found = [
            {
                "kernel": name,
                "us": us,
                "gflops_per_s": rate(cost.flops, us * 1e-3),
                "gbytes_per_s": rate(cost.bytes, us * 1e-3),
                "rule": name == rule,
                "chosen": name == taken,
            }
            for name, us in sorted(times.items(), key=lambda item: item[1])
        ]
        params = {name: str(value) for name, value in equation.params.items()}
        rows.append({"problem": described(equation), "params": params, "candidates": found})
    return rows


def report(result: Mapping[str, Any], width: int) -> list[str]:
    """A table for each problem; a kernel is called by what not all of them have in common. The one marked "rule" is
    taken where nothing has been measured."""
    lines = bench_report.protocol(result)
    for row in result["candidates"]:
        found = row["candidates"]
        names = distinct([each["kernel"] for each in found])
        cells = [
            [name, f"{each['us']:.2f}", *map(bench_report.per_second, (each["gflops_per_s"], each["gbytes_per_s"])),
             f"{found[0]['us'] / each['us']:.0%}", ", ".join(mark for mark in ("chosen", "rule") if each[mark])]
            for name, each in zip(names, found, strict=True)
        ]  # fmt: skip
        params = ", ".join(f"{name} {value}" for name, value in row["params"].items())
        lines += ["", f"{row['problem']}, {params}" if params else row["problem"], *render(COLUMNS, cells, width)]
    return lines
