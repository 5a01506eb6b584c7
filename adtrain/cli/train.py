"""`adtrain train`: trains a config, or resumes a run, writes the run's folder and prints a report."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from adtrain import config, training
from adtrain.cli import dry_run as planning
from adtrain.cli.names import ConfigName, RunPath
from adtrain.cli.options import (
    FilePath,
    autotune_option,
    json_option,
    plugin_option,
    quiet_option,
    refusing,
    resolve_tuned_device,
    set_option,
    trust_option,
    unresolved_device_option,
)
from adtrain.cli.output import is_quiet, print_json, progress, show
from adtrain.cli.ranks import ranks_options
from adtrain.cli.train_report import MAX_ROWS, report
from adtrain.cli.train_run import display_of, in_thread, new_folder, profile_and_summarize, run_training
from adtrain.cli.values import Whole
from adtrain.config.records import plain
from adtrain.config.sweep_section import MAX_MEMBERS
from adtrain.core import communicator
from adtrain.core.status import report_status
from adtrain.core.timeline import during
from adtrain.display import ProgressLines
from adtrain.distributed.session import agreed, same_everywhere
from adtrain.table import terminal_width
from adtrain.training import RunFolder, tensorboard

MOST_PROFILED_STEPS = 10_000


def _without_effect(run: Path | None, seeds: int | None, **_: Any) -> tuple[Collection[str], str]:
    """The parameters that have no effect in this use of the command, and the error for one of them."""
    of_run = {"override", "copies"}
    if run is not None:
        return {"config_path", "seeds", "output_dir", "dry_run"}, "--resume RUN continues a run, and takes no {}"
    if seeds is not None:
        of_one = {"ranks", "timeout", "profile_steps", "debug_nan", "events", "mode", "verbose"}
        return of_run | of_one, "--seeds trains a sweep, and takes no {}"
    return of_run, "{} is for --resume RUN only"


@click.command(short_help="Train the network that a config describes.")
@click.argument("config_path", metavar="[CONFIG]", required=False, type=ConfigName())
@refusing(_without_effect)
@click.option("--resume", "run", type=RunPath(), metavar="RUN", help="Resume a run: its folder, or a checkpoint.")
@click.option("--override", is_flag=True, help="Resume a run even if its config or data have changed.")
@unresolved_device_option
@ranks_options
@autotune_option
@click.option("--epochs", type=Whole(min=1), metavar="N", help="Passes over the data; overrides training.epochs.")
@click.option("--steps", type=Whole(min=1), metavar="N", help="Maximum number of steps; overrides training.steps.")
@click.option(
    "--seed",
    type=Whole(0, 2**64 - 1),
    metavar="N",
    help="Seed of all random numbers; overrides training.seed.",
)
@click.option(
    "--output-dir",
    type=FilePath(),
    metavar="DIR",
    help="The folder for the run's files; by default runs/NAME (NAME-2, ...).",
)
@set_option
@plugin_option
@trust_option
@click.option(
    "--profile-steps",
    type=Whole(min=0, max=MOST_PROFILED_STEPS),
    metavar="N",
    default=10,
    show_default=True,
    help="Steps to profile after training; 0 for none.",
)
@click.option("--debug-nan", is_flag=True, help="Check for NaN and infinity after each step; slow.")
@click.option("--tensorboard", "events", is_flag=True, help="Write event files into RUN/tensorboard during the run.")
@click.option(
    "--seeds",
    type=Whole(1, MAX_MEMBERS),
    metavar="N",
    help="Train N networks together, from seed, seed + 1, ..., as adtrain sweep does, into runs/NAME-sweep or DIR.",
)
@click.option("--eager", "mode", flag_value="eager", help="Run the step operation by operation.")
@click.option("--no-fuse", "mode", flag_value="staged", help="Run each operation as a separate kernel.")
@click.option("--dry-run", is_flag=True, help="Check everything, show costs and memory; train and write nothing.")
@quiet_option("run")
@click.option("-v", "--verbose", is_flag=True, help="Also print the plan, metrics every hundred steps, all operations.")
@json_option
def command(
    config_path: str | None,
    run: Path | None,
    override: bool,
    device: str,
    autotune: str,
    epochs: int | None,
    steps: int | None,
    seed: int | None,
    output_dir: Path | None,
    overrides: tuple[str, ...],
    plugins: tuple[str, ...],
    copies: bool,
    profile_steps: int,
    debug_nan: bool,
    events: bool,
    seeds: int | None,
    mode: str | None,
    dry_run: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Train the network that CONFIG describes: a YAML file, or the name of a packaged config such as mlp.

    The run's folder gets config.yaml, metrics.jsonl, model.safetensors, checkpoints and summary.json. Ctrl-C or SIGTERM
    stops the training after the current steps. --resume RUN continues it; the result is the same as without the stop.
    """
    if config_path is None and run is None:
        raise click.UsageError("found neither CONFIG nor --resume RUN")
    if config_path is not None and config.is_run(config_path):
        again = f"--resume {shlex.quote(config_path)} continues it"
        again += f", {shlex.quote(f'{config_path}/config.yaml')} trains it again"
        raise click.UsageError(f"{config_path}: found the folder of a run, expected a config; {again}")
    if verbose and is_quiet():
        raise click.UsageError("found both --quiet and --verbose, expected one of them")
    if run is not None or seeds is not None or dry_run:
        device = resolve_tuned_device(device, autotune)
    if events:
        tensorboard.check(run or output_dir or Path())
    longer = _settings(epochs=epochs, steps=steps)
    settings, step_mode = [*overrides, *_settings(seed=seed)], training.Mode(mode or "fused")

    if seeds is not None:
        from adtrain.cli import sweep

        sweep.train_seeds(str(config_path), [*settings, *longer], plugins, seeds, device, output_dir, dry_run, as_json)
        return

    def finish(
        experiment: training.Experiment,
        folder: RunFolder,
        start: training.Start | None,
        display: ProgressLines,
    ) -> training.Summary:
        """Train to the end, profile the operations, and write the summary; returns the summary."""
        first = communicator.current().rank == 0
        with folder.locked() if first else nullcontext():
            if start is not None and first:
                folder.reopen(experiment, start)
            result = run_training(experiment, folder, device, start, debug_nan, events and first, display)
            return profile_and_summarize(experiment, folder, device, profile_steps, result)

    if run is not None:
        with during("data"):
            trust = training.Trust(plugins, copies, override)
            experiment, folder, start, notes = agreed(
                lambda: training.resume(run, settings, longer, override, step_mode, trust)
            )
        same_everywhere(lambda: experiment.identity(device))
        training.check_precision(experiment.config, device)
        for note in notes:
            progress(note)
        with display_of(experiment.config, verbose) as display:
            summary = finish(experiment, folder, start, display)
    else:
        with during("config"):
            cfg = agreed(lambda: config.load(str(config_path), [*settings, *longer], plugins))
        if dry_run:
            training.check_precision(cfg, device)
            found = planning.plan(training.prepare(cfg, step_mode), device, output_dir)
            if as_json:
                print_json(found)
            elif not is_quiet():
                show(
                    f"{cfg.name}: no mistake found; nothing is trained or written",
                    *planning.lines(found, cfg.data.examples),
                )
            return
        with display_of(cfg, verbose) as display:
            report_status("reading the data")
            with during("data"):
                # The data are read while the libraries of the device are imported.
                data = None if cfg.plugins else in_thread(lambda: training.read_ahead(cfg))
                device = resolve_tuned_device(device, autotune, display.close)
                training.check_precision(cfg, device)
                experiment = agreed(lambda: training.prepare(cfg, step_mode, read=data))
            same_everywhere(lambda: experiment.identity(device))
            notes = [] if experiment.batch_note is None else [experiment.batch_note]
            if epochs is not None and steps is None and experiment.epochs < epochs:
                end = f"epoch {experiment.epochs} of {epochs}"
                notes.append(f"training.steps {cfg.training.steps} ends the training in {end}; --steps N overrides it")
            if verbose:
                plan = planning.plan(experiment, device, output_dir)
                notes += planning.lines(plan, experiment.config.data.examples)
            if notes:
                display.close()
            for note in notes:
                progress(note)
            folder = new_folder(experiment, output_dir)
            summary = finish(experiment, folder, None, display)
    if as_json:
        print_json(plain(summary))
        return
    if is_quiet():
        show(folder.path)
        return
    rows = None if verbose else MAX_ROWS
    lines = report(summary, len(experiment.test), terminal_width(), rows, experiment.config.data.examples)
    show(*lines, "", f"{folder.path}: {', '.join(folder.files())}")


def _settings(**options: int | None) -> list[str]:
    """Options as overrides of the config's section `training`."""
    return [f"training.{name}={value}" for name, value in options.items() if value is not None]
