"""Trains a config, or resumes a run, writes the run's folder and prints a report: the work of `adtrain train`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from adtrain import training
from adtrain.cli.options import resolve_tuned_device
from adtrain.cli.output import is_quiet, is_silent, message, print_json, progress, show
from adtrain.cli.train_report import (
    MAX_ROWS,
    losses,
    operation_lines,
    peak_of,
    plan_lines,
    plan_of,
    plot_lines,
    result_lines,
)
from adtrain.config import Config
from adtrain.config.records import plain
from adtrain.core import communicator
from adtrain.core.timeline import during, report_status, status_handler
from adtrain.display import IntervalLines, ProgressLines, progress_display
from adtrain.distributed.agreement import AgreedExit, agreed, same_everywhere
from adtrain.signals import stop_signals
from adtrain.table import broken, terminal_width
from adtrain.training import Observer, RunFolder, scores, tensorboard
from adtrain.training.loop import any_rank, largest
from adtrain.training.progress import read_metrics

T = TypeVar("T")

PROFILED_STEPS = 10
"""The steps whose operations `--profile` times."""


def train(
    cfg: Config | None,
    run: Path | None,
    *,
    settings: list[str],
    longer: list[str],
    epochs: int | None,
    steps: int | None,
    plugins: tuple[str, ...],
    device: str,
    autotune: str,
    output_dir: Path | None,
    override: bool,
    copies: bool,
    profile: bool,
    events: bool,
    eager: bool,
    no_fuse: bool,
    dry_run: bool,
    plot: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Train a config, or resume a run. The other arguments are options of `cli.train.command`.

    `settings` and `longer` are overrides of the run's config: those that are given, and the epochs and steps.
    """
    if run is not None or dry_run:
        device = resolve_tuned_device(device, autotune)
    if events:
        tensorboard.check(run or output_dir or Path())
    step_mode = training.Mode.EAGER if eager else training.Mode.STAGED if no_fuse else training.Mode.FUSED

    def finish(
        experiment: training.Experiment,
        folder: RunFolder,
        start: training.Start | None,
        display: ProgressLines,
    ) -> training.Summary:
        """Train to the end, profile the operations, and write the summary; returns the summary."""
        first = communicator.current().rank == 0
        with folder.in_training(experiment.config) if first else nullcontext():
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
    elif cfg is not None:
        if dry_run:
            print_plan(cfg, step_mode, device, output_dir, as_json)
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
            notes = list(notes_of(experiment, None if steps is not None else epochs))
            if verbose:
                notes += plan_lines(plan_of(experiment, device, output_dir), experiment.config.data.examples)
            if notes:
                display.close()
            for note in notes:
                progress(note)
            folder = new_folder(experiment, output_dir)
            summary = finish(experiment, folder, None, display)
    if as_json:
        print_json(plain(summary))
    elif is_quiet():
        show(folder.path)
    else:
        print_result(summary, experiment, folder, plot, verbose)


def print_plan(cfg: Config, mode: training.Mode, device: str, output_dir: Path | None, as_json: bool) -> None:
    """Check a config as a training does, and print the plan of the training. Nothing is trained or written.

    Raises the errors of `training.prepare` and `plan_of`.
    """
    training.check_precision(cfg, device)
    plan = plan_of(training.prepare(cfg, mode, device=device), device, output_dir)
    if as_json:
        print_json(plan)
    elif not is_quiet():
        show(f"{cfg.name}: no mistake found; nothing is trained or written", *plan_lines(plan, cfg.data.examples))


def notes_of(experiment: training.Experiment, epochs: int | None) -> Iterator[str]:
    """Notes before the first step: on the batch size, and on the end of the training before the requested `epochs`."""
    if experiment.batch_note is not None:
        yield experiment.batch_note
    if epochs is not None and experiment.epochs < epochs:
        steps, end = experiment.config.training.steps, f"epoch {experiment.epochs} of {epochs}"
        yield f"training.steps {steps} ends the training in {end}; --steps N overrides it"


def print_result(
    summary: training.Summary, experiment: training.Experiment, folder: RunFolder, plot: bool, verbose: bool
) -> None:
    """Print the table of a profile, the confusion matrix, with `plot` the curve of the loss, and the result."""
    if summary.ops:
        show(*operation_lines(summary, terminal_width(), None if verbose else MAX_ROWS), "")
    if confusion := scores.confusion_lines(summary.metrics, experiment.data.classes, terminal_width()):
        show(*confusion, "")
    if plot:
        show(*plot_lines(losses(read_metrics(folder.path)), terminal_width()), "")
    files = f": {', '.join(folder.files())}" if verbose else ""
    *lines, test = result_lines(summary, len(experiment.test), experiment.config.data, verbose)
    lines += [f"run     {folder.path}{files}", test, f"next    adtrain report {shlex.quote(str(folder.path))}"]
    show(*(part for line in lines for part in broken(line, terminal_width())))


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


def _line(text: str) -> None:
    """Print a line of progress, on a terminal broken between words; in a file each epoch is one line."""
    for line in broken(text, terminal_width()) if sys.stderr.isatty() else [text]:
        progress(line)


@contextmanager
def display_of(cfg: Config, verbose: bool) -> Iterator[ProgressLines]:
    """The display of a training's progress, and of status messages before its first step."""
    kind = IntervalLines if verbose else ProgressLines if is_quiet() else progress_display
    with closing(kind(_line, cfg.data.examples)) as display, status_handler(display.show_status):
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
    from adtrain.bench.profile import profile_steps

    measured = profile_steps(training.continuation(experiment, state, device), PROFILED_STEPS, device=device)
    return {"ops": tuple(measured.rows), "ops_sum_ms": measured.ops_sum_ms, "profiled_step_ms": measured.step_ms}
