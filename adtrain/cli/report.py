"""`adtrain report`: writes an HTML page, and PNG files, of a run."""

from __future__ import annotations

from pathlib import Path

import click

from adtrain import report
from adtrain.cli.names import RunPath
from adtrain.cli.options import FilePath, device_option, trust_options
from adtrain.cli.output import progress, show
from adtrain.cli.precision import note_precision
from adtrain.core.errors import AdtrainError, DeviceError
from adtrain.files import write_atomic
from adtrain.report import AnyPredictions, figures, page
from adtrain.training import Trust


@click.command(short_help="Write an HTML report of a run, and PNG files.")
@click.argument("run", type=RunPath())
@click.option(
    "-o", "--output", type=FilePath(), metavar="FILE", help="The page to write; by default report.html in RUN."
)
@click.option(
    "--png", "pictures", type=FilePath(), metavar="DIR", help="Also write the pictures as PNG files into DIR."
)
@device_option
@trust_options
def command(run: Path, output: Path | None, pictures: Path | None, device: str, trust: Trust) -> None:
    """Write an HTML file about the run in the folder RUN: results, learning curves, predictions, times of
    operations.

    The file needs no network. If the run is unfinished or its data are missing, the page lacks some parts and says so.
    --png also writes learning_curves.png, and confusion_matrix.png and worst_mistakes.png, or for numbers
    predicted_against_true.png and residuals.png. It needs matplotlib (pip install 'adtrain[report]').
    """
    if pictures is not None:
        figures.check()
    record = report.read(run, trust)
    note_precision(record.config, device)
    predictions = _predictions(run, device, trust)
    for line in page.missing(record, predictions):
        progress(f"{run}: {line}")
    written = [output or run / "report.html"]
    write_atomic(written[0], page.render(record, predictions).encode())
    if pictures is not None:
        written += figures.write(record, predictions, pictures)
    show(*written)


def _predictions(run: Path, device: str, trust: Trust) -> AnyPredictions | str:
    """The predictions, or the reason why there are none."""
    try:
        return report.predict(run, device, trust)
    except DeviceError:
        raise
    except AdtrainError as error:
        return "; ".join(error.lines)
