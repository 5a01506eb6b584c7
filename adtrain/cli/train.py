"""`adtrain train`: trains a config, or resumes a run, writes the run's folder and prints a report."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import click

from adtrain import config, training
from adtrain.bench.profile import profile_steps
from adtrain.cli import loss_plot
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
from adtrain.cli.output import is_quiet, is_silent, message, message_of_rank, print_json, progress, show
from adtrain.cli.train_report import MAX_ROWS, operation_lines, peak_of, plan_lines, plan_of, result_lines
from adtrain.config import Config
from adtrain.config.records import plain
from adtrain.config.sweep_section import MAX_MEMBERS
from adtrain.core import communicator
from adtrain.core.status import report_status, status_handler
from adtrain.core.timeline import during
from adtrain.display import IntervalLines, ProgressLines, progress_display
from adtrain.distributed.environment import place
from adtrain.distributed.launch import launch
from adtrain.distributed.session import AgreedExit, agreed, joined, same_everywhere
from adtrain.plugins import named_errors
from adtrain.signals import end_on_signals, stop_signals
from adtrain.table import terminal_width
from adtrain.training import Observer, RunFolder, scores, tensorboard
from adtrain.training.loop import any_rank, largest
from adtrain.training.progress import read_metrics

T = TypeVar("T")

PROFILED_STEPS = 10
MOST_RANKS = 4096


def ranks_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command. It starts itself N times, or, where a launcher started it, runs as a rank."""

    def is_launching(ctx: click.Context, param: click.Parameter, value: int | None) -> int | None:
        ctx.meta[LAUNCHING] = value is not None and place(os.environ) is None
        return value

    @functools.wraps(command)
    def as_rank(*args: Any, ranks: int | None, timeout: float, **options: Any) -> None:
        found = place(os.environ)
        if ranks is not None and found is None:
            raise SystemExit(launch(ranks, sys.argv[1:], timeout, message))
        if ranks is not None and found is not None and ranks != found.size:
            raise click.UsageError(f"found --ranks {ranks}, but {found.launcher} started {found.size} processes")
        with joined(timeout, message_of_rank, _described), named_errors():
            end_on_signals()
            command(*args, **options)

    ranks_option = click.option(
        "--ranks",
        type=Whole(1, MOST_RANKS),
        metavar="N",
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
        show_default=True,
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
        of_one = {"ranks", "timeout", "profile", "events", "eager", "no_fuse", "plot", "verbose"}
        yield of_run | of_one, "--seeds trains a sweep, and takes no {}"
    elif dry_run:
        yield {*of_run, "profile", "events", "plot", "verbose"}, "--dry-run trains nothing, and takes no {}"
    else:
        yield of_run, "{} is for --resume RUN only"
    if ranks is not None or (process is not None and process.size > 1):
        yield {"profile"}, "{} times the operations of one process, and takes no --ranks, torchrun, mpiexec or srun"
    elif process is None:
        yield {"timeout"}, "{} is for several processes: --ranks, torchrun, mpiexec or srun"
    if eager:
        yield {"no_fuse"}, "--eager has no kernels to fuse, and takes no {}"


HEADINGS = {
    "What to train": "seed epochs steps set plugin seeds",
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
@click.option("--profile", is_flag=True, help="Time the operations of a step after the training, and print them.")
@click.option("--tensorboard", "events", is_flag=True, help="Write event files into RUN/tensorboard during the run.")
@click.option(
    "--seeds",
    type=Whole(1, MAX_MEMBERS),
    metavar="N",
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
    profile: bool,
    events: bool,
    seeds: int | None,
    eager: bool,
    no_fuse: bool,
    dry_run: bool,
    plot: bool,
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
    if plot and (as_json or is_quiet()):
        raise click.UsageError(f"found both {'--json' if as_json else '--quiet'} and --plot, expected one of them")
    if run is not None or seeds is not None or dry_run:
        device = resolve_tuned_device(device, autotune)
    if events:
        tensorboard.check(run or output_dir or Path())
    longer = _settings(epochs=epochs, steps=steps)
    settings = [*overrides, *_settings(seed=seed)]
    step_mode = training.Mode.EAGER if eager else training.Mode.STAGED if no_fuse else training.Mode.FUSED

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
            display.peak = peak_of(experiment.config, device)
            result = run_training(experiment, folder, device, start, events and first, display)
            return profile_and_summarize(experiment, folder, device, profile, result)

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
            found = plan_of(training.prepare(cfg, step_mode, device=device), device, output_dir)
            if as_json:
                print_json(found)
            elif not is_quiet():
                show(
                    f"{cfg.name}: no mistake found; nothing is trained or written",
                    *plan_lines(found, cfg.data.examples),
                )
            return
        with display_of(cfg, verbose) as display:
            report_status("reading the data")
            with during("data"):
                # The data are read while the libraries of the device are imported.
                data = None if cfg.plugins else in_thread(lambda: training.read_ahead(cfg))
                device = resolve_tuned_device(device, autotune, display.close)
                training.check_precision(cfg, device)
                experiment = agreed(lambda: training.prepare(cfg, step_mode, read=data, device=device))
            same_everywhere(lambda: experiment.identity(device))
            notes = [] if experiment.batch_note is None else [experiment.batch_note]
            if epochs is not None and steps is None and experiment.epochs < epochs:
                end = f"epoch {experiment.epochs} of {epochs}"
                notes.append(f"training.steps {cfg.training.steps} ends the training in {end}; --steps N overrides it")
            if verbose:
                plan = plan_of(experiment, device, output_dir)
                notes += plan_lines(plan, experiment.config.data.examples)
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
    if summary.ops:
        show(*operation_lines(summary, terminal_width(), None if verbose else MAX_ROWS), "")
    if confusion := scores.confusion_lines(summary.metrics, experiment.data.classes, terminal_width()):
        show(*confusion, "")
    if plot:
        show(*loss_plot.plot(loss_plot.losses(read_metrics(folder.path)), terminal_width()), "")
    files = f": {', '.join(folder.files())}" if verbose else ""
    lines = result_lines(summary, len(experiment.test), experiment.config.data, verbose)
    show(*lines, f"run     {folder.path}{files}")


def _settings(**options: int | None) -> list[str]:
    """Options as overrides of the config's section `training`."""
    return [f"training.{name}={value}" for name, value in options.items() if value is not None]


def run_training(
    experiment: training.Experiment,
    folder: RunFolder,
    device: str,
    start: training.Start | None,
    events: bool,
    display: ProgressLines,
) -> training.Result:
    """Train and write the run's files. If the run is stopped, print how to resume it, and exit."""
    with ExitStack() as stack:
        stack.callback(display.close)
        signals = stack.enter_context(stop_signals(is_silent()))
        observers: list[Observer] = [display]
        if events:
            at = None if start is None else start.checkpoint.progress.step
            files = tensorboard.EventFiles(folder.path / tensorboard.FOLDER, resumed_at=at)
            observers.append(stack.enter_context(closing(files)))
        stop = signals.stop_requested
        advice = folder.advice(experiment.config)
        try:
            result = training.run_in_folder(folder, experiment, device, observers, start, stop)
        except training.Interrupted as stopped:
            display.close()
            message(f"{stopped}; {advice}")
            raise AgreedExit(largest(signals.exit_code)) from None
    if any_rank(signals.stop_requested()):  # after the last test batch: too late for Interrupted
        message(f"stopped before the summary; {advice}")
        raise AgreedExit(largest(signals.exit_code))
    return result


def in_thread(function: Callable[[], T]) -> Callable[[], T]:
    """Call a function in a thread; returns what waits for its result. The end of the process does not wait for it."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="adtrain-data", daemon=True).start()
    return future.result


@contextmanager
def display_of(cfg: Config, verbose: bool) -> Iterator[ProgressLines]:
    """The display of a training's progress, and of status messages before its first step."""
    kind = IntervalLines if verbose else ProgressLines if is_quiet() else progress_display
    with closing(kind(progress, cfg.data.examples)) as display, status_handler(display.show_status):
        yield display


def new_folder(experiment: training.Experiment, path: Path | None) -> RunFolder:
    """The new folder, created by rank 0."""
    if communicator.current().size == 1:
        return RunFolder.create(experiment, path)
    first = communicator.current().rank == 0
    created = agreed(lambda: RunFolder.create(experiment, path) if first else None)
    return RunFolder(Path(communicator.gathered_texts("" if created is None else str(created.path))[0]))


def profile_and_summarize(
    experiment: training.Experiment, folder: RunFolder, device: str, profile: bool, result: training.Result
) -> training.Summary:
    """Time the operations of a step with `profile`, and write the summary; returns the summary."""
    with during("profile"):
        ops = step_profile(experiment, result.state, device) if profile else {}
    summary = training.summarize(experiment, result, device, **ops, peak=peak_of(experiment.config, device))
    if communicator.current().rank == 0:
        folder.write_summary(summary)
    return summary


def step_profile(experiment: training.Experiment, state: training.TrainState, device: str) -> dict[str, Any]:
    """The times of the operations of a step that starts from `state`, as fields of a summary."""
    measured = profile_steps(training.continuation(experiment, state, device), PROFILED_STEPS, device=device)
    return {"ops": tuple(measured.rows), "ops_sum_ms": measured.ops_sum_ms, "profiled_step_ms": measured.step_ms}
