"""`adtrain summary`: a config's layers, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence

import click

from adtrain import config, training
from adtrain.cli.options import json_option, print_json, set_option
from adtrain.cli.table import Column, render, terminal_width

COLUMNS = (
    Column("layer", text=True),
    Column("kind", text=True),
    Column("output", rank=1, text=True),
    Column("parameters"),
    Column("forward"),
    Column("backward", rank=2),
)


@click.command(short_help="Show a config's layers, shapes, parameters and FLOPs.")
@click.argument("config_path", metavar="CONFIG")
@set_option
@json_option
def command(config_path: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show the layers of the network that CONFIG describes: output shape, parameters and FLOPs for one image.

    Forward FLOPs are those of inference, backward FLOPs those of training; a multiply-add counts as two. They are
    counted by running the model once on zeros; no data are read.
    """
    cfg = config.load(config_path, overrides)
    rows = training.layer_costs(cfg)
    parameters, forward, backward = (
        sum(getattr(row, field) for row in rows) for field in ("parameters", "forward_flops", "backward_flops")
    )
    if as_json:
        totals = {"parameters": parameters, "forward_flops": forward, "backward_flops": backward}
        layers = [row._asdict() for row in rows]
        print_json({"name": cfg.name, "input": cfg.model.input, "layers": layers, **totals})
        return
    cells = [
        [row.name, row.kind, shape_text(row.output_shape), count(row.parameters), flops(row.forward_flops),
         flops(row.backward_flops)]
        for row in rows
    ]  # fmt: skip
    cells.append(["total", "", "", f"{parameters:,}", flops(forward), flops(backward)])
    click.echo(f"{cfg.name}: input {shape_text(cfg.model.input)}, {cfg.training.precision}; FLOPs for one image")
    click.echo("\n".join(render(COLUMNS, cells, terminal_width())))


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def count(number: int) -> str:
    return f"{number:,}" if number else ""


def flops(number: float) -> str:
    """Three digits and a prefix: 3.21 M."""
    if not number:
        return ""
    for prefix in ("", " k", " M", " G", " T"):
        if number < 999.5 or prefix == " T":
            break
        number /= 1000
    return f"{number:.3g}{prefix}" if prefix else str(int(number))
