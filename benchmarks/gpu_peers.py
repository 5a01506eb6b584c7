"""The training step on one GPU, here and in PyTorch and JAX: medians of alternating rounds.

    python benchmarks/gpu_peers.py [--only mlp-128-sgd,...] [--peers ours,torch-graph,...] [--seconds S] [--json FILE]

Each side of each row is a process of its own, and all of them get ready (import, compile, warm up) at once; then one
works at a time. See `gpu_steps.py` for what a step is. The losses after the first steps must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click
import numpy as np
from gpu_report import Report
from gpu_steps import CHUNK, SIDES
from sides import Side, serve, tell

from adtrain import config, training

LOSS_TOLERANCE = {"float32": 2e-2, "tf32": 5e-2}
"""Relative, after CHUNK steps: sums in another order drift apart."""

MOMENTUM = "optimizer={sgd: {lr: 0.1, momentum: 0.9}}"
BIG = "model.layers=[{linear: 4096}, relu, {linear: 4096}, relu, {linear: 4096}, relu, {linear: 10}]"
BIG_MLP = ("mlp", BIG, "data.batch_size=7500", "optimizer={sgd: {lr: 0.01, momentum: 0.9}}")
TF32 = "training.precision=tf32"

WORKLOADS: dict[str, tuple[str, ...]] = {
    "mlp-128-sgd": ("mlp", MOMENTUM),
    "mlp-128-adam": ("mlp",),
    "mlp-1024-adam": ("mlp", "data.batch_size=1024"),
    "mlp-small-64-sgd": ("mlp-small",),
    "lenet5-128-adam": ("lenet5", "optimizer={adam: {lr: 0.001}}"),
    "cnn-128-adam": ("cnn", "optimizer={adam: {lr: 0.001}}"),
    "cnn-1024-adam": ("cnn", "optimizer={adam: {lr: 0.001}}", "data.batch_size=1024"),
    "cnn-1024-adam-tf32": ("cnn", "optimizer={adam: {lr: 0.001}}", "data.batch_size=1024", TF32),
    "big-mlp-7500-sgd": BIG_MLP,
    "big-mlp-7500-sgd-tf32": (*BIG_MLP, TF32),
}
"""A packaged config and what overrides it."""


def names(known: Sequence[str]) -> Any:
    """A callback for an option that takes several of the known names, separated by commas; by default all."""

    def chosen(ctx: click.Context, param: click.Parameter, value: str | None) -> Sequence[str]:
        found = list(known) if value is None else value.split(",")
        if unknown := set(found) - set(known):
            raise click.BadParameter(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
        return found

    return chosen


def work(side: str, workload: str) -> None:
    """A side's process: says its loss after a chunk; then, asked for N, takes N chunks and says how long it took."""
    name, *overrides = WORKLOADS[workload]
    experiment = training.prepare(config.load(name, [*overrides, "schedule=constant"]))
    take = SIDES[side](experiment)
    loss = take(1)
    take(2)
    tell({"loss": loss})

    def timed(chunks: str) -> dict[str, float]:
        start = perf_counter()
        loss = take(int(chunks))
        return {"seconds": perf_counter() - start, "loss": loss}

    serve(timed)


def started(side: str, workload: str) -> Side:
    few = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    return Side([__file__, "--side", side, "--only", workload], few)


@click.command()
@click.option("--only", callback=names(list(WORKLOADS)), metavar="ROW,...", help="Rows; by default all.")
@click.option("--peers", callback=names(list(SIDES)), metavar="SIDE,...", help="Sides; by default all.")
@click.option("--seconds", default=2.0, show_default=True, help="Measuring time of each side of a row.")
@click.option("--rounds", default=7, show_default=True, help="Rounds that the time is divided into.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the numbers to a file.")
@click.option("--side", hidden=True)
def main(
    only: Sequence[str], peers: Sequence[str], seconds: float, rounds: int, path: Path | None, side: str | None
) -> None:
    """Compare the step of each row on each side."""
    if side is not None:
        work(side, only[0])
        return
    report, begun = Report(path), perf_counter()
    sides = {(row, peer): started(peer, row) for row in only for peer in peers}
    try:
        first = dict(first_losses(sides))
        click.echo(f"ready after {perf_counter() - begun:.0f} s", err=True)
        click.echo(f"{'us a step':22}" + "".join(f"{peer:>15}" for peer in peers) + f"   loss after {CHUNK} steps")
        for row in only:
            ready = {peer: sides[row, peer] for peer in peers if (row, peer) in first}
            times, last = measured(ready, seconds, rounds)
            losses = {peer: first[row, peer] for peer in ready}
            report.add({"row": row, "us": times, "loss_after_chunk": losses, "loss_at_end": last})
            click.echo(line(row, peers, times, losses))
    finally:
        for each in sides.values():
            each.close()
    click.echo(report.line())


def first_losses(sides: dict[tuple[str, str], Side]) -> Iterator[tuple[tuple[str, str], float]]:
    """The first answer of each side that gets as far."""
    for (row, peer), side in sides.items():
        try:
            yield (row, peer), side.answer()["loss"]
        except click.ClickException as error:
            click.echo(f"{row}: {peer}: {error.message}", err=True)


def measured(sides: dict[str, Side], seconds: float, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """For each side the median over the rounds of its microseconds a step, and its last loss.

    There are fewer rounds, but at least three, where a side cannot do as many chunks in its time.
    """
    times, last = {peer: list[float]() for peer in sides}, {}
    took = {peer: side.ask(1)["seconds"] for peer, side in sides.items()}
    chunks = {peer: max(1, round(seconds / rounds / each)) for peer, each in took.items()}
    for _ in range(max(3, min(rounds, int(seconds / max(took.values(), default=seconds))))):
        for peer, side in sides.items():
            found = side.ask(chunks[peer])
            times[peer].append(found["seconds"] / (chunks[peer] * CHUNK) * 1e6)
            last[peer] = found["loss"]
    return {peer: median(found) for peer, found in times.items()}, last


def line(row: str, peers: Sequence[str], times: dict[str, float], losses: dict[str, float]) -> str:
    cells = "".join(f"{times[peer]:15.1f}" if peer in times else f"{'failed':>15}" for peer in peers)
    tolerance = LOSS_TOLERANCE["tf32" if row.endswith("tf32") else "float32"]
    values = list(losses.values())
    agree = bool(values) and np.allclose(values, values[0], rtol=tolerance)
    shown = " ".join(f"{loss:.5f}" for loss in values) + ("" if agree else "  DIFFERENT")
    others = [time for peer, time in times.items() if peer != "ours"]
    ratio = f"  best peer / ours {min(others) / times['ours']:.2f}" if "ours" in times and others else ""
    return f"{row:22}{cells}   {shown}{ratio}"


if __name__ == "__main__":
    main()
