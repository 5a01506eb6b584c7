"""`adtrain bench --candidates`: what each kernel that a GPU has for an operation reaches at the standard sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import click

from adtrain.backends.cuda.autotune import Mode, contests, winner
from adtrain.backends.cuda.contest import described, distinct
from adtrain.cli import bench_report
from adtrain.cli.options import progress
from adtrain.cli.table import Column, render
from adtrain.core.array import ArrayType
from adtrain.core.backend import backend
from adtrain.core.hooks import Call, Hook, hook
from adtrain.core.program import Equation, Variable
from adtrain.measure.bench_ops import sample, works
from adtrain.measure.bench_sizes import Bench
from adtrain.measure.profile import rate

COLUMNS = (
    Column("kernel", text=True),
    Column("us"),
    Column("GFLOP/s", rank=1),
    Column("GB/s", rank=2),
    Column("of fastest", rank=3),
    Column("", text=True),
)


class _Equations(Hook):
    """What runs, as equations."""

    def __init__(self) -> None:
        self.found: list[Equation] = []

    def before(self, call: Call) -> None:
        inputs = tuple(Variable(ArrayType(x.shape, x.dtype), call.device) for x in call.args)
        outputs = tuple(Variable(t, call.device) for t in call.outputs)
        self.found.append(Equation(call.primitive, inputs, call.params, outputs))


def measured(benches: Sequence[Bench]) -> list[dict[str, Any]]:
    """For each distinct problem of the benches its candidates, the fastest one first.

    Raises:
        UsageError: there is no choice for any of them.
    """
    tuner = cast(Any, backend("gpu")).tuner
    seen = _Equations()
    for each in benches:
        with hook(seen):
            for work in works(each, sample(each, "gpu")).values():
                work()
    problems = list(contests(seen.found))
    if not problems:
        raise click.UsageError("--candidates: there is one kernel for each of these operations")
    progress(f"bench: measuring the candidates of {len(problems)} problems")
    rows = []
    for contest, times in tuner.times(problems, measure=True):
        equation, rule = contest.equation, contest.labels[0]
        cost = equation.primitive.cost([v.type for v in equation.inputs], equation.params)
        taken = rule if tuner.mode is Mode.OFF else winner(contest, times)
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
