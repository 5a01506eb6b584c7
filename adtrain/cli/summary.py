"""`adtrain summary`: a config's layers, and the costs of a training step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import itemgetter
from typing import Any

import click

from adtrain import config, training
from adtrain.cli.options import ConfigName, json_option, plugin_option, set_option
from adtrain.cli.output import print_json, show
from adtrain.config import Config
from adtrain.nn.module import size_text
from adtrain.table import COUNT, TEXT, CellFormat, Column, render, terminal_width
from adtrain.text import counted, short
from adtrain.training import StepCosts
from adtrain.training.costs import LayerCost, Total

BYTES = CellFormat(partial(short, unit="B"))
FLOPS = CellFormat(short)
LAYERS: tuple[Column[LayerCost], ...] = (
    Column("layer", lambda row: row.name, TEXT),
    Column("kind", lambda row: row.kind, TEXT),
    Column("output", lambda row: size_text(row.output_shape), TEXT, rank=1),
    Column("parameters", lambda row: row.parameters or None, COUNT),
    Column("forward", lambda row: row.forward.flops, FLOPS),
    Column("backward", lambda row: row.backward.flops, FLOPS, rank=2),
    Column("bytes forward", lambda row: row.forward.bytes, BYTES, rank=3),
    Column("bytes backward", lambda row: row.backward.bytes, BYTES, rank=4),
)
STEP: tuple[Column[tuple[str, Total]], ...] = (
    Column("step", lambda row: row[0], TEXT),
    Column("equations", lambda row: row[1].equations),
    Column("FLOPs", lambda row: row[1].flops, FLOPS),
    Column("bytes", lambda row: row[1].bytes, BYTES),
)
MEMORY = (
    Column("memory", itemgetter(0), TEXT),
    *(Column(title, itemgetter(i), BYTES) for i, title in enumerate(("planned", "separate", "unfused"), 1)),
)


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
    shape, precision = size_text(cfg.model.input_shape), cfg.training.precision
    if as_json:
        about = {"name": cfg.name, "input": cfg.model.input_shape, "precision": precision}
        print_json({**about, "batch_size": experiment.full_batch, **record(costs)})
        return
    batch = counted(experiment.full_batch, cfg.data.examples)
    show(f"{cfg.name}: input {shape}, {precision}; FLOPs and bytes of a step on {batch}")
    show(*report(cfg, costs, terminal_width()))


def report(cfg: Config, costs: StepCosts, width: int) -> Iterator[str]:
    """The lines of three tables: the layers, the step's equations, and the memory."""
    forward, backward, update = (costs.phases[phase] for phase in ("forward", "backward", "update"))
    total = LayerCost("total", "", (), sum(row.parameters for row in costs.layers), forward, backward)
    yield from render(LAYERS, [*costs.layers, total], width)

    phases = {
        "forward": forward,
        "backward": backward,
        f"optimizer ({cfg.optimizer.kind})": update,
        "total": costs.unfused,
        "fused": costs.fused,
    }
    yield ""
    yield from render(STEP, list(phases.items()), width)

    memory = costs.memory
    resident = {
        "parameters": memory.parameters,
        "running statistics": memory.statistics,
        "optimizer state": memory.optimizer,
        "data set" if cfg.data.path is None else "data set (one batch)": memory.data,
    }
    rows = [
        *((name, size, size, size) for name, size in resident.items() if size),
        ("values of a step", memory.values, memory.separate_values, memory.unfused_values),
        ("threads' scratch", memory.scratch, memory.scratch, 0),
        ("peak", memory.peak, memory.separate_peak, memory.unfused_peak),
    ]
    yield ""
    yield from render(MEMORY, rows, width)


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
