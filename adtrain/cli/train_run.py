"""Trains a config, or resumes a run, writes the run's folder and prints a report: the work of `adtrain train`."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, nullcontext
from math import inf, isfinite
from pathlib import Path
from threading import Thread
from typing import Any, TypeAlias, TypeVar

from adtrain import training
from adtrain.bench import machine
from adtrain.cli.options import resolve_tuned_device
from adtrain.cli.output import is_quiet, is_silent, message, print_json, progress, show
from adtrain.config import Config
from adtrain.config.document import Data
from adtrain.config.records import plain
from adtrain.core import communicator, timeline
from adtrain.core.backend import backend
from adtrain.core.timeline import during, report_status, status_handler
from adtrain.display import IntervalLines, ProgressLines, progress_display
from adtrain.distributed.agreement import AgreedExit, agreed, same_everywhere
from adtrain.signals import stop_signals
from adtrain.table import PERCENT, TEXT, CellFormat, Column, broken, render, terminal_width
from adtrain.text import counted, mebibytes, short
from adtrain.training import Experiment, Observer, RunFolder, scores, tensorboard
from adtrain.training.costs import too_large
from adtrain.training.loop import any_rank, largest
from adtrain.training.progress import Epoch, Interval, Line, Validated, read_metrics
from adtrain.training.summary import OperationTime, Summary, model_text, operations_text, speed_text

CALLS, MS, RATE = CellFormat("{:g}".format), CellFormat("{:.3f}".format), CellFormat("{:.1f}".format)
COLUMNS: tuple[Column[OperationTime], ...] = (
    Column("op", lambda row: row.op, TEXT),
    Column("scope", lambda row: row.scope, TEXT),
    Column("phase", lambda row: row.phase, TEXT, rank=1),
    Column("calls", lambda row: row.calls, CALLS, rank=2),
    Column("ms", lambda row: row.ms, MS),
    Column("share", lambda row: row.share, PERCENT),
    Column("GFLOP/s", lambda row: row.gflops_per_s or None, RATE, rank=3),
    Column("GB/s", lambda row: row.gbytes_per_s or None, RATE, rank=4),
)
Points: TypeAlias = Sequence[tuple[int, float]]
"""Pairs of a step and a loss."""

HEIGHT = 12
"""Lines of the curve."""
MARKS = {"training": ".", "validation": "o"}
MAX_ROWS = 15
LEAST_SECONDS = 0.05


def plan_of(experiment: Experiment, device: str, path: Path | None) -> dict[str, Any]:
    """The plan of a training into the folder `path`, or runs/NAME, as JSON values. Nothing is written.

    `seconds_at_peak` is the time of the FLOPs of all steps at the device's measured peak rate; None if that rate was
    not measured. A training takes longer, unless its kernels need fewer FLOPs (Winograd convolutions, 2:4 sparsity).

    Raises:
        AdtrainError: the folder cannot be made, or the step does not fit on the device.
    """
    folder = RunFolder.planned(experiment, path)
    if (error := too_large(experiment, device)) is not None:
        raise error
    costs, cfg = training.step_costs(experiment, device), experiment.config
    validation = 0 if experiment.validation is None else len(experiment.validation)
    flops, rate = costs.fused.flops, peak_of(cfg, device)
    return {
        "name": cfg.name,
        "folder": str(folder),
        "device": device,
        "device_name": backend(device).device_name(),
        "data": {"train": len(experiment.train), "validation": validation, "test": len(experiment.test)},
        "parameters": sum(row.parameters for row in costs.layers),
        "precision": cfg.training.precision,
        "epochs": experiment.epochs,
        "steps": experiment.total_steps,
        "batch_size": experiment.full_batch,
        "step_flops": flops,
        "step_bytes": costs.fused.bytes,
        "planned_bytes": costs.memory.peak,
        "seconds_at_peak": None if rate is None else flops * experiment.total_steps / rate,
    }


def peak_of(cfg: Config, device: str) -> float | None:
    """The device's measured FLOP a second of products in the precision of the config; None if it was not measured."""
    peak = machine.known_roofline(device)
    if peak is None:
        return None
    return 1e9 * peak.gflops_per_s.get(cfg.training.precision, peak.gflops_per_s["float32"])


def plan_lines(plan: dict[str, Any], examples: str) -> list[str]:
    """The plan as lines of text; `examples` says what the data consist of."""
    data, steps, seconds = plan["data"], plan["steps"], plan["seconds_at_peak"]
    held_out = f"{data['validation']:,} validation, " if data["validation"] else ""
    time = (
        "unknown; adtrain devices --measure measures the rates that predict it"
        if seconds is None
        else f"at least {f'{seconds:,.1f}' if seconds >= 1 else f'{seconds:.1g}'} s, at the device's peak FLOP rate"
    )
    return [
        f"data    {data['train']:,} training, {held_out}{counted(data['test'], f'test {examples}')}",
        f"model   {plan['parameters']:,} parameters, {plan['precision']}",
        f"device  {plan['device']}, {plan['device_name']}",
        f"steps   {steps:,} of {counted(plan['batch_size'], examples)}; epochs: {plan['epochs']}",
        f"work    {short(plan['step_flops'])}FLOP and {short(plan['step_bytes'], 'B')} a step",
        f"memory  {mebibytes(plan['planned_bytes'])} planned peak",
        f"time    {time}",
        f"folder  {plan['folder']}",
    ]


def result_lines(summary: Summary, tested: int, data: Data, verbose: bool = False) -> list[str]:
    """The lines of the result, the scores last. `tested` examples of the `data` were tested."""
    best = summary.best
    examples, speed = data.examples, ""
    if summary.images_per_second is not None:
        share = "" if summary.peak_share is None else f", {summary.peak_share:.0%} of peak"
        speed = f" ({speed_text(data, summary.images_per_second)}{share})"
    lines = [
        f"model   {summary.parameters:,} parameters, {summary.precision}",
        f"device  {summary.device}, {summary.device_name}",
        *(_details(summary, examples) if verbose else ()),
        f"time    {summary.total_seconds:.1f} s in all, {summary.train_seconds:.1f} s training{speed}",
    ]
    if summary.ended == "early_stopping":
        lines.append(f"ended   early, after epoch {summary.epochs}: {best.by} was best in epoch {best.epoch}")
    if summary.ended == "line_search":
        lines.append(
            f"ended   after {summary.steps:,} steps: the line search finds no lower loss in {summary.precision}; "
            "the weights are those with the lowest"
        )
    if (chosen := model_text(summary)) is not None:
        lines.append(f"weights {chosen}")
    if summary.coefficients is not None:
        lines.append(f"learnt  {', '.join(f'{name} {value:.6g}' for name, value in summary.coefficients.items())}")
    lines += scores.metric_lines(summary.metrics)
    if summary.baseline is not None:
        lines.append(f"base    accuracy {summary.baseline:.2%}, of the most frequent class")
    return [*lines, f"test    {scores.text(summary.test)} of {counted(tested, examples)}"]


def _details(summary: Summary, examples: str) -> list[str]:
    """The lines about steps, memory, and the activities that took at least a twentieth of a second, longest first."""
    lines = [f"steps   {summary.steps:,} of {counted(summary.batch_size, examples)}"]
    if (step := summary.step_ms) is not None:
        lines.append(f"step    median {step.median:.2f} ms, p20 {step.p20:.2f}, p80 {step.p80:.2f}")
    memory = summary.memory
    if memory.planned_bytes is not None:
        held = "" if memory.held_bytes is None else f", {mebibytes(memory.held_bytes)} allocated"
        lines.append(f"memory  {mebibytes(memory.planned_bytes)} planned peak{held}")
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in summary.spans:
        seconds[span.name] += span.seconds
    others = sorted((-time, name) for name, time in seconds.items() if name != "training" and time >= LEAST_SECONDS)
    if others:
        lines.append(f"other   {', '.join(f'{name} {-time:.2f} s' for time, name in others)}")
    return lines


def operation_lines(summary: Summary, width: int, max_rows: int | None = MAX_ROWS) -> list[str]:
    """The table of a step's operations, slowest first, the first `max_rows` of them, and their sum."""
    rows = sorted(summary.ops, key=lambda row: -row.ms)
    top, rest = rows[:max_rows], rows[len(rows) if max_rows is None else max_rows :]
    if rest:
        calls, ms, share = (sum(getattr(row, field) for row in rest) for field in ("calls", "ms", "share"))
        top.append(OperationTime(f"{len(rest)} more rows", "", "", calls, ms, share, 0, 0, None, None))
    return [
        "operations of one step, by time",
        *render(COLUMNS, top, width),
        *textwrap.wrap(operations_text(summary), width),
    ]


def losses(lines: Sequence[Line]) -> dict[str, Points]:
    """The losses by part of the data, from the lines of metrics.jsonl. Those of the training are of intervals."""
    found = defaultdict[str, list[tuple[int, float]]](list)
    for x in lines:
        if isinstance(x, Interval):
            found["training"].append((x.step, x.train.loss))
        elif isinstance(x, Epoch | Validated) and x.validation is not None:
            found["validation"].append((x.step, x.validation.loss))
    return {name: found[name] for name in MARKS if found[name]}


def plot_lines(curves: Mapping[str, Points], width: int) -> list[str]:
    """The lines of a picture of curves. A column shows the mean of the losses at its steps."""
    curves = {name: [(step, y) for step, y in points if isfinite(y)] for name, points in curves.items()}
    points = [point for found in curves.values() for point in found]
    if not points:
        return []
    last, low, high = max(step for step, _ in points), min(y for _, y in points), max(y for _, y in points)
    labels = {0: f"{high:.4g}", HEIGHT - 1: f"{low:.4g}"}
    margin = max(map(len, labels.values()))
    columns = max(width - margin - 2, 1)
    rows = [[" "] * columns for _ in range(HEIGHT)]
    for name, found in curves.items():
        by_column = defaultdict[int, list[float]](list)
        for step, y in found:
            by_column[min(step * columns // (last + 1), columns - 1)].append(y)
        for column, ys in by_column.items():
            height = (sum(ys) / len(ys) - low) / (high - low or 1.0)
            rows[round((1 - height) * (HEIGHT - 1))][column] = MARKS[name]
    shown = [f"{labels.get(i, ''):>{margin}} |{''.join(row).rstrip()}" for i, row in enumerate(rows)]
    axis = f"{' ' * margin} +{'-' * columns}"
    end = f"{last:,} steps"
    legend = ", ".join(f"{MARKS[name]} {name}" for name, found in curves.items() if found)
    return ["loss", *shown, axis, f"{legend}{end:>{max(width - len(legend), len(end) + 1)}}"]


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
    max_time: float | None,
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
    deadline = inf if max_time is None else timeline.current().began + max_time
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
            result = run_training(experiment, folder, device, start, events and first, display, deadline)
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
    deadline: float,
) -> training.Result:
    """Train and write the run's files. If the run is stopped, print how to resume it, and exit.

    `deadline`, by `time.perf_counter`, stops the run too.
    """
    with ExitStack() as stack:
        stack.callback(display.close)
        signals = stack.enter_context(stop_signals(is_silent(), deadline))
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
    if any_rank(signals.number is not None):  # after the last test batch: too late for Interrupted
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
