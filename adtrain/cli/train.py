"""`adtrain train`: from a config to a run's folder and a report."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from adtrain import config, training
from adtrain.cli.options import (
    FilePath,
    autotune_option,
    device_option,
    json_option,
    mode_options,
    print_json,
    progress,
    set_autotune,
    set_option,
)
from adtrain.cli.progress import display
from adtrain.cli.report import report
from adtrain.cli.table import terminal_width
from adtrain.measure import profile


@click.command(short_help="Train the network that a config describes.")
@click.argument("config_path", metavar="CONFIG")
@device_option
@autotune_option
@click.option("--epochs", type=click.IntRange(min=1), help="Passes over the data; training.epochs of the config.")
@click.option("--steps", type=click.IntRange(min=1), help="Stop after so many steps; training.steps of the config.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Seed of all randomness; training.seed of the config.")
@click.option(
    "--output-dir",
    type=FilePath(),
    metavar="DIR",
    help="Where the run's files go; runs/NAME (NAME-2, ...) where left out.",
)
@set_option
@click.option(
    "--profile-steps",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Steps whose operations are timed after training; 0 for none.",
)
@mode_options
@json_option
def command(
    config_path: str,
    device: str,
    autotune: str,
    epochs: int | None,
    steps: int | None,
    seed: int | None,
    output_dir: Path | None,
    overrides: tuple[str, ...],
    profile_steps: int,
    mode: str | None,
    as_json: bool,
) -> None:
    """Train the network that CONFIG describes: a YAML file, or the name of a packaged config such as mlp.

    Writes config.yaml, metrics.jsonl, model.safetensors and summary.json into the run's folder.
    """
    started = perf_counter()
    set_autotune(device, autotune)
    given = {"epochs": epochs, "steps": steps, "seed": seed}
    options = [f"training.{name}={value}" for name, value in given.items() if value is not None]
    cfg = config.load(config_path, [*overrides, *options])
    training.check_precision(cfg, device)
    experiment = training.prepare(cfg, training.Mode(mode or "fused"))
    folder = training.RunFolder.create(experiment, output_dir)
    try:
        summary = _train(experiment, folder, device, profile_steps, started)
    except KeyboardInterrupt:
        progress(f"kept {folder.path}: {', '.join(folder.files())}")
        raise
    if as_json:
        print_json(summary)
        return
    click.echo("\n".join(report(summary, len(experiment.test), terminal_width())))
    click.echo(f"\n{folder.path}: {', '.join(folder.files())}")


def _train(
    experiment: training.Experiment, folder: training.RunFolder, device: str, steps: int, started: float
) -> dict[str, Any]:
    """Train, profile, and write everything; the content of summary.json."""
    recorder = training.Recorder(folder, experiment)
    with closing(display()) as shown:
        result = training.run(experiment, device, [shown, recorder])
    recorder.finished(result)
    total_seconds = perf_counter() - started
    ops: dict[str, Any] = {}
    if steps:
        measured = profile.profile_steps(training.continuation(experiment, result.state, device), steps, device=device)
        ops = {"ops": measured.rows, "ops_sum_ms": measured.ops_sum_ms, "ops_to_step_ratio": measured.ratio}
    summary = training.summarize(experiment, result, device, total_seconds, **ops)
    folder.write_summary(summary)
    return summary
