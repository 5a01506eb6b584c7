"""`adtrain summary`: a config's layers, and the costs of a training step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click

from adtrain import config, training
from adtrain.cli.options import ConfigName, json_option, plugin_option, set_option
from adtrain.cli.output import print_json, show
from adtrain.config import Config
from adtrain.nn.fields import size_text
from adtrain.table import Column, render, terminal_width
from adtrain.text import counted, short
from adtrain.training import StepCosts
from adtrain.training.costs import Total

LAYERS = (
    Column("layer", text=True),
    Column("kind", text=True),
    Column("output", rank=1, text=True),
    Column("parameters"),
    Column("forward"),
    Column("backward", rank=2),
    Column("bytes forward", rank=3),
    Column("bytes backward", rank=4),
)
STEP = (Column("step", text=True), Column("equations"), Column("FLOPs"), Column("bytes"))
MEMORY = (Column("memory", text=True), Column("planned"), Column("separate"), Column("unfused"))


@click.command()
@click.argument("config_path", metavar="CONFIG|RUN", type=ConfigName())
@set_option
@plugin_option
@json_option
def command(config_path: str, overrides: tuple[str, ...], plugins: tuple[str, ...], as_json: bool) -> None:
    """Show the layers of the network of CONFIG, or of the run in the folder RUN, and the costs of a training step on a
    full batch.

    The first table has the output shape and parameters of each layer, and its FLOPs (a multiply-add counts as two) and
    bytes read and written, forward and backward. The second has the step's equations, before fusion and fused. The
    third has the memory of all arrays of the process: as planned, without sharing memory between values ("separate"),
    and the same before fusion ("unfused").

    Everything is computed from the step's equations: nothing is run, and no data are read.
    """
    cfg = training.with_input(config.load(config_path, overrides, plugins))
    experiment = training.outline(cfg)
    costs = training.step_costs(experiment)
    shape, precision = size_text(cfg.model.input), cfg.training.precision
    if as_json:
        about = {"name": cfg.name, "input": cfg.model.input, "precision": precision}
        print_json({**about, "batch_size": experiment.full_batch, **record(costs)})
        return
    batch = counted(experiment.full_batch, cfg.data.examples)
    show(f"{cfg.name}: input {shape}, {precision}; FLOPs and bytes of a step on {batch}")
    show(*report(cfg, costs, terminal_width()))


def report(cfg: Config, costs: StepCosts, width: int) -> Iterator[str]:
    """The lines of three tables: the layers, the step's equations, and the memory."""
    forward, backward, update = (costs.phases[phase] for phase in ("forward", "backward", "update"))
    rows = [
        [row.name, row.kind, size_text(row.output_shape), count(row.parameters), *work(row.forward, row.backward)]
        for row in costs.layers
    ]
    rows.append(["total", "", "", count(sum(row.parameters for row in costs.layers)), *work(forward, backward)])
    yield from render(LAYERS, rows, width)

    phases = {
        "forward": forward,
        "backward": backward,
        f"optimizer ({cfg.optimizer.kind})": update,
        "total": costs.unfused,
        "fused": costs.fused,
    }
    yield ""
    step = [[name, str(x.equations), short(x.flops), short(x.bytes, "B")] for name, x in phases.items()]
    yield from render(STEP, step, width)

    memory = costs.memory
    resident = {
        "parameters": memory.parameters,
        "running statistics": memory.statistics,
        "optimizer state": memory.optimizer,
        "data set" if cfg.data.path is None else "data set (one batch)": memory.data,
    }
    used = [[name, *[short(size, "B")] * 3] for name, size in resident.items() if size]
    for name, sizes in {
        "values of a step": (memory.values, memory.separate_values, memory.unfused_values),
        "threads' scratch": (memory.scratch, memory.scratch, 0),
        "peak": (memory.peak, memory.separate_peak, memory.unfused_peak),
    }.items():
        used.append([name, *(short(size, "B") for size in sizes)])
    yield ""
    yield from render(MEMORY, used, width)


def work(forward: Total, backward: Total) -> Sequence[str]:
    both = forward, backward
    return [*(short(x.flops) for x in both), *(short(x.bytes, "B") for x in both)]


def record(costs: StepCosts) -> dict[str, Any]:
    """The costs as JSON values; sizes are in bytes."""
    layers = [
        {**row._asdict(), "forward": row.forward._asdict(), "backward": row.backward._asdict()} for row in costs.layers
    ]
    memory = costs.memory
    peaks = {"peak": memory.peak, "separate_peak": memory.separate_peak, "unfused_peak": memory.unfused_peak}
    return {
        "parameters": sum(row.parameters for row in costs.layers),
        "layers": layers,
        **{phase: total._asdict() for phase, total in costs.phases.items()},
        "total": costs.unfused._asdict(),
        "fused": costs.fused._asdict(),
        "memory": {**memory._asdict(), **peaks},
    }


def count(number: int) -> str:
    return f"{number:,}" if number else ""
