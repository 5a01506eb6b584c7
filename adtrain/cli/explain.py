"""`adtrain explain`: what binds a training step, and what change would help."""

from __future__ import annotations

import click

from adtrain import training
from adtrain.bench import explain
from adtrain.cli.options import (
    ConfigName,
    OneOf,
    Output,
    autotune_option,
    device_option,
    output_options,
    plugin_option,
    resolve_device,
    set_autotune,
    set_option,
)
from adtrain.cli.output import progress


@click.command()
@click.argument("config_path", metavar="CONFIG|RUN", type=ConfigName())
@click.option("--try", "with_trials", is_flag=True, help="Measure each proposed setting that changes the step.")
@click.option("--eager", is_flag=True, help="Explain the step that runs operation by operation.")
@click.option("--also", type=OneOf(["cpu", "gpu"]), help="Time the step on this device, too, and show both.")
@set_option
@plugin_option
@device_option
@autotune_option
@output_options
def command(
    config_path: str,
    with_trials: bool,
    eager: bool,
    also: str | None,
    overrides: tuple[str, ...],
    plugins: tuple[str, ...],
    device: str,
    autotune: str,
    output: Output,
) -> None:
    """Explain the time of a training step of CONFIG, or of the run in the folder RUN, and propose changes.

    The step is timed, whole and by operation. Each operation is bound by arithmetic, by memory or a cache, by the fixed
    cost of its launch, or by another limit. A cause of slow training is shown with its evidence, a proposed change, and
    the predicted gain in examples per second. Times are those of the fastest steps. --html writes all of it as a page.
    """
    set_autotune(device, autotune)
    mode = training.Mode.EAGER if eager else training.Mode.FUSED
    others = [] if also is None else [resolve_device(also)]
    if also == device:
        raise click.UsageError(f"found --also {also}, which is the device itself; expected the other one")
    output.write(explain.result(config_path, overrides, plugins, device, others, mode, with_trials, progress))
