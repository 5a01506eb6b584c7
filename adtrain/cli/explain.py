"""`adtrain explain`: what binds a training step, and what change would help."""

from __future__ import annotations

import click

from adtrain import training
from adtrain.bench import explain, text
from adtrain.cli.options import (
    ConfigName,
    autotune_option,
    device_option,
    json_option,
    plugin_option,
    set_autotune,
    set_option,
)
from adtrain.cli.output import print_json, progress, show
from adtrain.table import terminal_width


@click.command()
@click.argument("config_path", metavar="CONFIG|RUN", type=ConfigName())
@click.option("--try", "with_trials", is_flag=True, help="Measure each proposed setting that changes the step.")
@click.option("--eager", is_flag=True, help="Explain the step that runs operation by operation.")
@set_option
@plugin_option
@device_option
@autotune_option
@json_option
def command(
    config_path: str,
    with_trials: bool,
    eager: bool,
    overrides: tuple[str, ...],
    plugins: tuple[str, ...],
    device: str,
    autotune: str,
    as_json: bool,
) -> None:
    """Explain the time of a training step of CONFIG, or of the run in the folder RUN, and propose changes.

    The step is timed, whole and by operation. Each operation is bound by arithmetic, by memory or a cache, by the fixed
    cost of its launch, or by another limit. A cause of slow training is shown with its evidence, a proposed change, and
    the predicted gain in examples per second. Times are those of the fastest steps.
    """
    set_autotune(device, autotune)
    mode = training.Mode.EAGER if eager else training.Mode.FUSED
    found = explain.result(config_path, overrides, plugins, device, mode, with_trials, progress)
    if as_json:
        print_json(found.to_json())
    else:
        show(*text.render(found, terminal_width()))
