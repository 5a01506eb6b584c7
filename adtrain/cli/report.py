"""`adtrain report`: writes an HTML page of a run, or of several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from adtrain import report, training
from adtrain.cli.options import OutputFile, RunPath, device_option, trust_options
from adtrain.cli.output import STDOUT, note_precision, progress, show, write_file
from adtrain.cli.train_run import step_profile
from adtrain.config import is_sweep
from adtrain.core.backend import backend
from adtrain.core.errors import AdtrainError, DeviceError
from adtrain.report import AnyPredictions, Record, pages
from adtrain.sweeps import finished
from adtrain.sweeps.folder import SweepFolder
from adtrain.training import Trust
from adtrain.training.summary import SUMMARY


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=RunPath())
@click.option(
    "-o",
    "--output",
    type=OutputFile(),
    metavar="FILE",
    help="The page to write; by default report.html in RUN, if there is only one.",
)
@device_option
@trust_options
def command(runs: tuple[Path, ...], output: Path | None, device: str, trust: Trust) -> None:
    """Write an HTML file about the run in the folder RUN: network, results, learning curves, predictions, and where
    the time went.

    For several runs the page shows the results, the differences of the configs, and the learning curves in common
    charts. Runs that differ only in the seed are one curve: their mean, in a band from the lowest to the highest value.

    RUN can be the folder of a sweep. Then the page shows the ranking, the values of the members as parallel
    coordinates, and the learning curves of the best settings. It links to the report of the best member.

    Where the training did not time the operations of a step (train --profile), the report does, on the same device.

    The page works offline. If a run is unfinished or its data are missing, the page lacks some parts and says so.
    """
    if len(runs) > 1:
        if output is None:
            raise click.UsageError(f"found {len(runs)} runs and no --output FILE; several runs have no default page")
        return _write(output, pages.runs_page([report.read(run, trust) for run in runs]))
    (run,) = runs
    if is_sweep(run):
        folder = SweepFolder.open(run)
        best = finished.run_path(folder, finished.finished_results(folder).members[0].member)
        if (best / SUMMARY).is_file():
            write_file(best / "report.html", _page(best, device, trust, is_member=True).encode())
        output = output or run / "report.html"
        return _write(output, pages.sweep_page_beside(folder, output.parent))
    return _write(output or run / "report.html", _page(run, device, trust))


def _write(output: Path, text: str) -> None:
    """Write the page, and print its path."""
    write_file(output, text.encode())
    if output != STDOUT:
        show(output)


def _page(run: Path, device: str, trust: Trust, is_member: bool = False) -> str:
    """The page of a run. A member of a sweep was trained with others: it has no own steps."""
    record = report.read(run, trust)
    note_precision(record.config, device)
    predictions = _predictions(run, device, trust)
    if not is_member and not isinstance(predictions, str):
        record = _with_operations(record, device)
    for line in pages.missing(record, predictions):
        progress(f"{run}: {line}")
    return pages.run_page(record, predictions)


def _with_operations(record: Record, device: str) -> Record:
    """The record with the times of a step's operations, measured where they are missing and the device is the same."""
    summary, here = record.summary, (device, backend(device).device_name())
    if summary is None or summary.ops or (summary.device, summary.device_name) != here:
        return record
    try:
        experiment = training.prepare(record.config)
        measured = step_profile(experiment, experiment.initial_state(device), device)
    except AdtrainError as error:
        progress(f"{record.path}: no times of operations: {'; '.join(error.lines)}")
        return record
    step_ms = measured["profiled_step_ms"] if summary.step_ms is None else summary.step_ms.median
    ratio = measured["ops_sum_ms"] / step_ms if step_ms else None
    return replace(record, summary=replace(summary, **measured, ops_to_step_ratio=ratio))


def _predictions(run: Path, device: str, trust: Trust) -> AnyPredictions | str:
    """The predictions, or the reason why there are none."""
    try:
        return report.predict(run, device, trust)
    except DeviceError:
        raise
    except AdtrainError as error:
        return "; ".join(error.lines)
