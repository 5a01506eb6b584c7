"""`adtrain train`: its arguments and options. `train_run` trains.

`train_run` is imported after the arguments are parsed, so that --help and errors in arguments take little time.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from adtrain import config
from adtrain.cli.options import (
    LAUNCHING,
    ConfigName,
    FilePath,
    HeadedCommand,
    Number,
    Refusals,
    RunPath,
    Whole,
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
from adtrain.cli.output import is_quiet, message, message_of_rank
from adtrain.config.names import find_config
from adtrain.core.timeline import during
from adtrain.distributed.environment import place
from adtrain.plugins import named_errors
from adtrain.signals import end_on_signals

MOST_RANKS = 4096
MOST_SEEDS = 100_000
"""`config.sweep_section.MAX_MEMBERS`, of which the import would take long."""


def ranks_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command. It starts itself N times, or, where a launcher started it, runs as a rank."""

    def is_launching(ctx: click.Context, param: click.Parameter, value: int | None) -> int | None:
        ctx.meta[LAUNCHING] = value is not None and place(os.environ) is None
        return value

    @functools.wraps(command)
    def as_rank(*args: Any, ranks: int | None, timeout: float, **options: Any) -> None:
        found = place(os.environ)
        if ranks is not None and found is None:
            from adtrain.distributed.launch import launch

            raise SystemExit(launch(ranks, sys.argv[1:], timeout, message))
        if ranks is not None and found is not None and ranks != found.size:
            raise click.UsageError(f"found --ranks {ranks}, but {found.launcher} started {found.size} processes")
        from adtrain.distributed.agreement import joined

        with joined(timeout, message_of_rank, _described), named_errors():
            end_on_signals()
            command(*args, **options)

    ranks_option = click.option(
        "--ranks",
        type=Whole(1, MOST_RANKS),
        is_eager=True,
        callback=is_launching,
        help="Train with N processes on this machine, each with a GPU of its own if it has GPUs. With data.shards set, "
        "the result is the same for each N that divides it.",
    )
    timeout_option = click.option(
        "--timeout",
        type=Number(min=1),
        metavar="S",
        default=300.0,
        help="With several processes: end all of them if one does not answer for S seconds.",
    )
    decorated: Callable[..., None] = ranks_option(timeout_option(as_rank))
    return decorated


def _described(error: Exception) -> tuple[str, int]:
    from adtrain.cli.main import described  # it imports the commands

    lines, code = described(error)
    return "\n".join(lines), code


def _without_effect(
    run: Path | None, seeds: int | None, dry_run: bool, ranks: int | None, eager: bool, **_: Any
) -> Refusals:
    """The parameters that have no effect in this use of the command."""
    of_run = {"override", "copies"}
    process = place(os.environ)
    if run is not None:
        yield {"config_path", "seeds", "output_dir", "dry_run"}, "--resume RUN continues a run, and takes no {}"
    elif seeds is not None:
        of_one = {"ranks", "timeout", "max_time", "profile", "events", "eager", "no_fuse", "plot", "verbose"}
        yield of_run | of_one, "--seeds trains a sweep, and takes no {}"
    elif dry_run:
        yield {*of_run, "max_time", "profile", "events", "plot", "verbose"}, "--dry-run trains nothing, and takes no {}"
    else:
        yield of_run, "{} is for --resume RUN only"
    if ranks is not None or (process is not None and process.size > 1):
        yield {"profile"}, "{} times the operations of one process, and takes no --ranks, torchrun, mpiexec or srun"
    elif process is None:
        yield {"timeout"}, "{} is for several processes: --ranks, torchrun, mpiexec or srun"
    if eager:
        yield {"no_fuse"}, "--eager has no kernels to fuse, and takes no {}"


HEADINGS = {
    "What to train": "seed epochs steps max-time set plugin seeds",
    "Where": "device ranks timeout autotune",
    "A stopped run": "resume override trust-plugins",
    "Results": "output-dir tensorboard plot quiet verbose json",
    "Checks and measurements": "dry-run profile eager no-fuse",
}
"""The options of `train` in its help."""


@click.command(cls=HeadedCommand, headings=HEADINGS)
@click.argument("config_path", metavar="[CONFIG]", required=False, type=ConfigName())
@refusing(_without_effect)
@click.option("--resume", "run", type=RunPath(), metavar="RUN", help="Resume a run: its folder, or a checkpoint.")
@click.option("--override", is_flag=True, help="Resume a run even if its config or data have changed.")
@unresolved_device_option
@ranks_options
@autotune_option
@click.option("--epochs", type=Whole(min=1), help="Passes over the data; overrides training.epochs.")
@click.option("--steps", type=Whole(min=1), help="Maximum number of steps; overrides training.steps.")
@click.option(
    "--max-time",
    type=Number(min=0, min_open=True),
    metavar="S",
    help="Stop the run, as Ctrl-C does, S seconds after the command began; exit code 124.",
)
@click.option("--seed", type=Whole(0, 2**64 - 1), help="Seed of all random numbers; overrides training.seed.")
@click.option(
    "-o",
    "--output-dir",
    type=FilePath(),
    metavar="DIR",
    help="The folder for the run's files; by default runs/NAME (NAME-2, ...).",
)
@set_option
@plugin_option
@trust_option
@click.option("--profile", is_flag=True, help="Time the operations of a step after the training, and print them.")
@click.option("--tensorboard", "events", is_flag=True, help="Write event files into RUN/tensorboard during the run.")
@click.option(
    "--seeds",
    type=Whole(1, MOST_SEEDS),
    help="Train N networks together, from seed, seed + 1, ..., as adtrain sweep does, into runs/NAME-sweep or DIR.",
)
@click.option("--eager", is_flag=True, help="Run the step operation by operation.")
@click.option("--no-fuse", is_flag=True, help="Run each operation as a separate kernel.")
@click.option("--dry-run", is_flag=True, help="Check everything, show costs and memory; train and write nothing.")
@click.option("--plot", is_flag=True, help="Draw the curve of the loss in the terminal after the training.")
@quiet_option("run")
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Print more: the plan, metrics every hundred steps, times, memory and all operations.",
)
@json_option
def command(
    config_path: str | None,
    run: Path | None,
    epochs: int | None,
    steps: int | None,
    seed: int | None,
    seeds: int | None,
    overrides: tuple[str, ...],
    plugins: tuple[str, ...],
    **options: Any,
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
    if options["verbose"] and is_quiet():
        raise click.UsageError("found both --quiet and --verbose, expected one of them")
    if options["plot"] and (options["as_json"] or is_quiet()):
        other = "--json" if options["as_json"] else "--quiet"
        raise click.UsageError(f"found both {other} and --plot, expected one of them")
    if config_path is not None:
        find_config(config_path)  # an unknown name is an error before the long imports
    longer = _settings(epochs=epochs, steps=steps)
    settings = [*overrides, *_settings(seed=seed)]
    if seeds is not None:
        from adtrain.cli import sweep

        device = resolve_tuned_device(options["device"], options["autotune"])
        common = {name: options[name] for name in ("output_dir", "dry_run", "as_json")}
        sweep.train_seeds(str(config_path), [*settings, *longer], plugins, seeds, device, **common)
        return
    cfg = None
    if run is None:
        with during("imports"):
            from adtrain.distributed.agreement import agreed
        with during("config"):
            cfg = agreed(lambda: _loaded(str(config_path), [*settings, *longer], plugins))
    with during("imports"):
        from adtrain.cli import train_run
    train_run.train(cfg, run, settings=settings, longer=longer, epochs=epochs, steps=steps, plugins=plugins, **options)


def _loaded(path: str, settings: list[str], plugins: tuple[str, ...]) -> config.Config:
    """The config. A data file that does not exist is an error before the long imports."""
    cfg = config.load(path, settings, plugins)
    if cfg.data.path is not None:
        data = Path(os.path.abspath(os.path.expanduser(cfg.data.path)))
        if not data.exists():
            from adtrain.data import formats

            formats.format_of(data)  # raises the error
    return cfg


def _settings(**options: int | None) -> list[str]:
    """Options as overrides of the config's section `training`."""
    return [f"training.{name}={value}" for name, value in options.items() if value is not None]
