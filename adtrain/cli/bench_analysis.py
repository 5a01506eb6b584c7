"""`adtrain bench --device cpu,gpu`: the CPU against the GPU, by operation and by config, and where the GPU wins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from adtrain import config, training
from adtrain.backends.cpu.naive import LABEL as NAIVE
from adtrain.backends.cpu.naive import OPTIMIZATION
from adtrain.bench.analysis import launch as analysis_launch
from adtrain.bench.analysis import ops as analysis_ops
from adtrain.bench.analysis import steps as analysis_steps
from adtrain.bench.analysis.ops import SIZED_OPS, TRANSFERS, Contestant, SizedOp
from adtrain.bench.peers.numpy_steps import naive_step
from adtrain.bench.peers.sides import SideSkips
from adtrain.bench.timing import protocol as about
from adtrain.cli.bench_report import noise, protocol, time_cell, wrapped
from adtrain.cli.op_option import select_ops
from adtrain.cli.options import progress, resolve_device
from adtrain.cli.table import Column, render, terminal_width
from adtrain.core.backend import backend

GROWING = "mlp"
"""The packaged config whose layers the networks that grow take the place of."""

SHAPES = (Column("threads"), Column("blocks"), Column("us"), Column("GB/s"), Column("", text=True))
CANDIDATES = (Column("candidate", text=True), Column("us"), Column("", text=True))


def devices_option(function: Any) -> Any:
    """`--device auto|cpu|gpu|cpu,gpu`; received as `devices`, those that it resolves to."""

    def resolved(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
        if value == "cpu,gpu":
            return resolve_device("cpu"), resolve_device("gpu")
        if value not in ("auto", "cpu", "gpu"):
            raise click.BadParameter(f"{value!r} is not one of 'auto', 'cpu', 'gpu', 'cpu,gpu'.")
        return (resolve_device(value),)

    return click.option(
        "--device",
        "devices",
        metavar="auto|cpu|gpu|cpu,gpu",
        default="auto",
        show_default=True,
        callback=resolved,
        help="Where to run; with cpu,gpu both are compared.",
    )(function)


def run(
    configs: Sequence[str], overrides: Sequence[str], names: Sequence[str], devices: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """The result, and the lines that show it: of configs; or else of the operations named; or else of all of them, of
    networks that grow, and of launch shapes.

    Raises:
        UsageError: there is no such operation.
        ConfigError, DataError: a config is wrong; nothing has been measured then.
    """
    contestants = [Contestant(device, device) for device in devices]
    if configs:
        for name in configs:
            cfg = config.load(name, overrides)
            for device in devices:
                training.check_precision(cfg, device)
            training.prepare(cfg)
        found: dict[str, Any] = {"configs": [_config(name, overrides, contestants) for name in configs]}
    else:
        found = _operations(select_ops(SIZED_OPS, names), contestants)
        if not names:
            found |= _growing(contestants) | _launches(devices)
    measured_by = {
        **about.protocol(devices[-1]),
        "clock": dict.fromkeys(("operations", "steps"), "the host's, until the device has finished"),
        "devices": {device: backend(device).device_name() for device in devices},
        "naive": f"{NAIVE}: {backend('cpu').compiler_name()}, {OPTIMIZATION}",
    }
    result = {"kind": "analysis", "protocol": measured_by, **found}
    return result, [*protocol(result), *report(result, terminal_width()), *noise(result)]


def _operations(chosen: Sequence[SizedOp], contestants: Sequence[Contestant]) -> dict[str, Any]:
    rows = []
    for op in chosen:
        progress(f"bench: {op.op} at {len(op.ladder)} sizes")
        rows.append(analysis_ops.measured(op, contestants))
    return {"operations": rows}


def _growing(contestants: Sequence[Contestant]) -> dict[str, Any]:
    progress("bench: networks that grow")
    over = analysis_steps.over_widths, analysis_steps.over_depths
    return {"growing": [measured(GROWING, contestants) for measured in over]}


def _launches(devices: Sequence[str]) -> dict[str, Any]:
    if "gpu" not in devices:
        return {}
    progress("bench: launch shapes and candidates")
    return {"launch": analysis_launch.launch_shapes(), "candidates": analysis_launch.candidates()}


def _config(name: str, overrides: Sequence[str], contestants: Sequence[Contestant]) -> dict[str, Any]:
    progress(f"bench: {name}, by naive loops and on {', '.join(each.label for each in contestants)}")
    try:
        step = analysis_steps.step(name, overrides, contestants, naive_step)
    except SideSkips as reason:
        step = {**analysis_steps.step(name, overrides, contestants), "without_naive": str(reason)}
    return {
        **step,
        "layers": analysis_steps.layers(name, overrides, contestants),
        "batches": analysis_steps.over_batches(name, overrides, contestants),
    }


def report(result: Mapping[str, Any], width: int) -> Iterator[str]:
    """The lines of all tables."""
    yield from wrapped(
        [
            "times of a call from the host until it is done; x: how many times faster than the CPU",
            f"{NAIVE}: products and convolutions as they are defined, {OPTIMIZATION}; cpu: vector code, all cores",
            f"{TRANSFERS}: with the arguments' way to the device, and the result's back",
        ]
    )
    for found in result.get("operations", ()):
        yield from _table(f"{found['op']}: {found['what']}", "n", found, width)
    for found in result.get("configs", ()):
        yield from _config_lines(found, width)
    for found in result.get("growing", ()):
        yield from _table(f"{found['of']}: a step over the {found['over']}", found["over"], found, width)
    if "launch" in result:
        yield from ("", *wrapped([f"{result['launch']['kernel']}: launch shapes, the 12 fastest and the rule's"]))
        rows = sorted(result["launch"]["rows"], key=lambda row: float(row["time"]["median_ms"]))
        cells = [
            [str(row["threads"]), str(row["blocks"]), f"{row['time']['median_ms'] * 1e3:.2f}",
             f"{row['gbytes_per_s']:.0f}", "rule" if row["rule"] else ""]
            for i, row in enumerate(rows) if i < 12 or row["rule"]
        ]  # fmt: skip
        yield from render(SHAPES, cells, width)
        yield from ("", f"{result['candidates']['problem']}: candidates")
        cells = [
            [row["kernel"], f"{row['us']:.2f}", ", ".join(mark for mark in ("taken", "rule") if row[mark])]
            for row in result["candidates"]["rows"]
        ]
        yield from render(CANDIDATES, cells, width)


def _config_lines(found: Mapping[str, Any], width: int) -> Iterator[str]:
    what = ", ".join([found["config"], *found["overrides"]])
    yield from ("", *wrapped([f"{what}: a step of {found['batch_size']} images"]))
    columns = Column("", text=True), Column("ms"), Column("x"), Column("95% interval", text=True)
    cells = []
    for label, time in found["times"].items():
        speedup = found["speedups"].get(label)
        interval = f"{speedup['low']:.3g} to {speedup['high']:.3g}" if speedup else ""
        cells.append([label, time_cell(time), f"{speedup['median']:.3g}" if speedup else "", interval])
    yield from render(columns, cells, width)
    if "without_naive" in found:
        yield from wrapped([f"{NAIVE} skipped: {found['without_naive']}"])
    labels = list(found["layers"][0]["ms"])
    yield from ("", "ms of each layer, an operation a kernel")
    cells = [
        [row["layer"] or "(no layer)", *(f"{row['ms'][label]:.4f}" for label in labels)] for row in found["layers"]
    ]
    yield from render([Column("layer", text=True), *map(Column, labels)], cells, width)
    yield from _table(f"{found['config']}: a step over the batch size", "batch", found["batches"], width)


def _table(title: str, size: str, found: Mapping[str, Any], width: int) -> Iterator[str]:
    """A row for each size: times by label, speed-ups, and below from where on each label wins."""
    rows = found["rows"]
    labels = list(dict.fromkeys(label for row in rows for label in row["times"]))
    faster = list(dict.fromkeys(label for row in rows for label in row["speedups"] if label != NAIVE))
    short = {label: TRANSFERS if label.endswith(TRANSFERS) else label for label in labels} | {NAIVE: "naive"}
    columns = [
        Column(size),
        *(Column(short[label]) for label in labels),
        *(Column(f"x {short[label]}") for label in faster),
    ]
    cells = [
        [
            f"{row[size]}",
            *(time_cell(row["times"][label]) if label in row["times"] else "" for label in labels),
            *(f"{row['speedups'][label]['median']:.3g}" for label in faster),
        ]
        for row in rows
    ]
    yield from ("", *wrapped([title]), *render(columns, cells, width))
    for label, where in found["crossover"].items():
        yield f"{label} is faster: {where['says']}"
