"""`adtrain graph`: a config's network, or the Program of its training step, as a picture or as text."""

from __future__ import annotations

from pathlib import Path

import click

from adtrain import config, graph, nn, training
from adtrain.cli.names import ConfigName
from adtrain.cli.options import FilePath, plugin_option, set_option
from adtrain.cli.output import progress
from adtrain.cli.summary import count
from adtrain.config import Config
from adtrain.core.errors import AdtrainError
from adtrain.files import write_atomic
from adtrain.nn.fields import size_text
from adtrain.table import Column, render

FORMATS = (".svg", ".dot", ".txt")
COLUMNS = (Column("layer", text=True), Column("kind", text=True), Column("output", text=True), Column("parameters"))
# Wide enough for every column, as the table goes to a file.
WIDTH = 10_000


@click.command(short_help="Draw a config's network, or its training step's equations.")
@click.argument("config_path", metavar="CONFIG|RUN", type=ConfigName())
@click.option("-o", "--output", type=FilePath(), required=True, metavar="FILE", help="FILE.svg, FILE.dot or FILE.txt.")
@click.option("--program", is_flag=True, help="Draw the equations of the training step instead of the layers.")
@click.option(
    "--after", metavar="PASS", help="With --program: show the step after this pass; by default after the last."
)
@set_option
@plugin_option
def command(
    config_path: str,
    output: Path,
    program: bool,
    after: str | None,
    overrides: tuple[str, ...],
    plugins: tuple[str, ...],
) -> None:
    """Draw the network of CONFIG, or of the run in the folder RUN: its layers with shapes and parameters, or the
    equations of one step.

    SVG needs Graphviz; DOT and text do not. Nothing is trained, and no data are read.
    """
    if output.suffix not in FORMATS:
        raise AdtrainError(f"{output}: unknown extension {output.suffix!r}, expected .svg, .dot or .txt")
    if after is not None and not program:
        raise click.UsageError("--after needs --program")
    cfg = training.with_input(config.load(config_path, overrides, plugins))
    if program:
        text = _program(cfg, output.suffix, after)
    else:
        text = _layers(cfg) if output.suffix == ".txt" else graph.network_dot(cfg)
    write_atomic(output, graph.svg(text) if output.suffix == ".svg" else text.encode())
    progress(f"wrote {output}")


def _program(cfg: Config, suffix: str, after: str | None) -> str:
    program = graph.step_program(cfg, after)
    if suffix == ".txt":
        return f"{program}\n"
    passes = "all passes" if after is None else after
    return graph.program_dot(program, f"{cfg.name}: {len(program.equations)} equations a step, after {passes}")


def _layers(cfg: Config) -> str:
    rows = nn.describe(config.build.model(cfg), cfg.model.input)
    cells = [["input", "", size_text(cfg.model.input), ""]]
    cells += [[row.name, row.kind, size_text(row.output_shape), count(row.parameters)] for row in rows]
    cells += [["loss", cfg.loss.kind, "", ""], ["total", "", "", f"{sum(row.parameters for row in rows):,}"]]
    return "\n".join([*render(COLUMNS, cells, WIDTH), ""])
