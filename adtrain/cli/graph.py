"""`adtrain graph`: a config's network, or its training step, as a picture, a page or text."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from adtrain import config, graphs, training
from adtrain.backends.cuda import TARGETS
from adtrain.cli.options import ConfigName, OneOf, OutputFile, format_of, format_option, plugin_option, set_option
from adtrain.cli.output import STDOUT, progress, write_file


@click.command()
@click.argument("config_path", metavar="CONFIG|RUN", type=ConfigName())
@click.option(
    "-o", "--output", type=OutputFile(), required=True, metavar="FILE", help="FILE.svg, .png, .html, .dot or .txt."
)
@format_option(graphs.FORMATS)
@click.option("--horizontal", is_flag=True, help="Draw the layers from left to right.")
@click.option("--program", is_flag=True, help="Draw a training step instead of the layers.")
@click.option(
    "--after",
    metavar="PASS",
    help=f"With --program: show the step after this pass of the compiler. 'trace' is the step as it was traced. "
    f"[default: {graphs.SIMPLIFIED}, the last pass before fusion]",
)
@click.option(
    "--device",
    type=OneOf(["cpu", "gpu"]),
    default="cpu",
    help="With --program: show the passes of this device. No GPU is needed.",
)
@click.option(
    "--arch", type=OneOf(TARGETS), help="With --device gpu: the architecture of the GPU.  [default: sm_90, an H200]"
)
@click.option(
    "--detail",
    is_flag=True,
    help="With --program: draw a box for each equation, not for each layer, and each of several equal blocks.",
)
@click.option(
    "--values",
    "with_values",
    is_flag=True,
    help="With --program and a page: show the values of one batch at the arrows, with the weights of RUN.",
)
@set_option
@plugin_option
def command(
    config_path: str,
    output: Path,
    suffix: str | None,
    horizontal: bool,
    program: bool,
    after: str | None,
    device: str,
    arch: str | None,
    detail: bool,
    with_values: bool,
    overrides: tuple[str, ...],
    plugins: tuple[str, ...],
) -> None:
    """Draw the network of CONFIG, or of the run in the folder RUN: its layers, or with --program a training step.

    In a step, forward runs down the left and backward up the right. Between them are the arrays that are kept for
    backward, with their bytes. The update is at the far right. FILE.html is an interactive page: a click on a box shows
    its equations, how many the passes leave of them, and its kernels; a slider shows the step after each pass of the
    compiler. With --device gpu the last passes are those of a GPU, whose fused equations are the kernels that it
    launches.

    With --values a click on an arrow shows the statistics, the histogram and the first elements of its values for the
    first batch.

    PNG needs `pip install 'adtrain[report]'`. Nothing is trained.
    """
    suffix = format_of(output, suffix, (".png",)) if suffix or output == STDOUT else graphs.checked_format(output)
    given = {"--after": after is not None, "--detail": detail, "--device": device == "gpu", "--values": with_values}
    for option in (name for name, is_given in given.items() if is_given and not program):
        raise click.UsageError(f"{option} needs --program")
    if arch is not None and device == "cpu":
        raise click.UsageError("--arch needs --device gpu")
    if horizontal and program:
        raise click.UsageError("--horizontal draws layers, found --program")
    if with_values and suffix != ".html":
        raise click.UsageError("--values needs a page: FILE.html")
    cfg = training.with_input(config.load(config_path, overrides, plugins))
    if program:
        target = TARGETS[arch or "sm_90"] if device == "gpu" else None
        run = Path(config_path) if Path(config_path).is_dir() else None
        values = partial(graphs.first_batch_inputs, run=run) if with_values else None
        graph = graphs.step_graph(cfg, after or graphs.SIMPLIFIED, detail, target, values)
    else:
        graph = graphs.network_graph(cfg, horizontal)
    write_file(output, graphs.FORMATS[suffix](graph))
    for note in graph.notes:
        progress(note)
    if output != STDOUT:
        progress(f"wrote {output}")
