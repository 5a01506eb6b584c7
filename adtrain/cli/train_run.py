"""One training of `adtrain train`: the display, the run's folder, the training, the profile and the summary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from adtrain import training
from adtrain.bench.steps import profile
from adtrain.cli.output import is_quiet, message, progress
from adtrain.cli.stop_signals import stop_signals
from adtrain.config import Config
from adtrain.core import communicator
from adtrain.core.status import status_handler
from adtrain.core.timeline import during
from adtrain.display import IntervalLines, ProgressLines, progress_display
from adtrain.distributed.session import AgreedExit, agreed
from adtrain.training import Observer, RunFolder, tensorboard
from adtrain.training.loop import any_rank, largest

T = TypeVar("T")


def run_training(
    experiment: training.Experiment,
    folder: RunFolder,
    device: str,
    start: training.Start | None,
    check: bool,
    events: bool,
    display: ProgressLines,
) -> training.Result:
    """Train and write the run's files. If the run is stopped, print how to resume it, and exit."""
    if check:
        progress("checking for NaN and infinity after each step, which is slow")
    with ExitStack() as stack:
        stack.callback(display.close)
        signals = stack.enter_context(stop_signals())
        observers: list[Observer] = [display]
        if events:
            at = None if start is None else start.checkpoint.progress.step
            files = tensorboard.EventFiles(folder.path / tensorboard.FOLDER, resumed_at=at)
            observers.append(stack.enter_context(closing(files)))
        stop = signals.stop_requested
        advice = folder.advice(experiment.config)
        try:
            result = training.run_in_folder(folder, experiment, device, observers, start, stop, check)
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
    experiment: training.Experiment,
    folder: RunFolder,
    device: str,
    steps: int,
    result: training.Result,
) -> training.Summary:
    """Profile `steps` steps and write the summary; returns the summary."""
    ops: dict[str, Any] = {}
    if steps and communicator.current().size == 1:
        with during("profile"):
            continuation = training.continuation(experiment, result.state, device)
            measured = profile.profile_steps(continuation, steps, device=device)
        ops = {"ops": measured.rows, "ops_sum_ms": measured.ops_sum_ms, "profiled_step_ms": measured.step_ms}
    summary = training.summarize(experiment, result, device, **ops)
    if communicator.current().rank == 0:
        folder.write_summary(summary)
    return summary
