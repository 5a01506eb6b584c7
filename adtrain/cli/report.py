"""`adtrain report`: writes an HTML page of a run, or of several."""

from __future__ import annotations

from pathlib import Path

import click

from adtrain import report
from adtrain.cli.names import RunPath
from adtrain.cli.notes import note_precision
from adtrain.cli.options import FilePath, device_option, trust_options
from adtrain.cli.output import progress, show
from adtrain.config import is_sweep
from adtrain.core.errors import AdtrainError, DeviceError
from adtrain.files import write_atomic
from adtrain.report import AnyPredictions, page, runs_page, sweep_page
from adtrain.sweeps import finished
from adtrain.sweeps.folder import SweepFolder
from adtrain.training import Trust
from adtrain.training.summary import SUMMARY


@click.command(short_help="Write an HTML report of a run, or of several.")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=RunPath())
@click.option(
    "-o",
    "--output",
    type=FilePath(),
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

    The page works offline. If a run is unfinished or its data are missing, the page lacks some parts and says so.
    """
    if len(runs) > 1:
        if output is None:
            raise click.UsageError(f"found {len(runs)} runs and no --output FILE; several runs have no default page")
        write_atomic(output, runs_page.render([report.read(run, trust) for run in runs]).encode())
        show(output)
        return
    (run,) = runs
    if is_sweep(run):
        folder = SweepFolder.open(run)
        best = finished.run_path(folder, finished.finished_results(folder).members[0].member)
        if (best / SUMMARY).is_file():
            _write(best, best / "report.html", device, trust)
        show(sweep_page.write(folder, output))
        return
    show(_write(run, output or run / "report.html", device, trust))


def _write(run: Path, output: Path, device: str, trust: Trust) -> Path:
    """Write the page of a run; returns its path."""
    record = report.read(run, trust)
    note_precision(record.config, device)
    predictions = _predictions(run, device, trust)
    for line in page.missing(record, predictions):
        progress(f"{run}: {line}")
    write_atomic(output, page.render(record, predictions).encode())
    return output


def _predictions(run: Path, device: str, trust: Trust) -> AnyPredictions | str:
    """The predictions, or the reason why there are none."""
    try:
        return report.predict(run, device, trust)
    except DeviceError:
        raise
    except AdtrainError as error:
        return "; ".join(error.lines)
