"""`adtrain report`: a run as a page of HTML, and as pictures."""

from __future__ import annotations

from pathlib import Path

import click

from adtrain import report
from adtrain.cli.options import FilePath, device_option, progress
from adtrain.cli.progress import note_precision
from adtrain.core.errors import AdtrainError, DeviceError
from adtrain.files import write_atomic
from adtrain.report import Predictions, figures, page


@click.command(short_help="Make a page, and pictures, of a run.")
@click.argument("run", type=FilePath())
@click.option(
    "-o", "--output", type=FilePath(), metavar="FILE", help="The page to write; report.html in RUN where left out."
)
@click.option("--png", "pictures", type=FilePath(), metavar="DIR", help="Also draw the pictures, as PNG files in DIR.")
@device_option
def command(run: Path, output: Path | None, pictures: Path | None, device: str) -> None:
    """Make one HTML file of the run in the folder RUN: results, learning curves, mistakes, and where the time went.

    The file needs no network. What an unfinished run lacks, or one whose data are gone, is said and left out. With
    --png, learning_curves.png, confusion_matrix.png and worst_mistakes.png are drawn as well, which needs matplotlib
    (pip install 'adtrain[report]').
    """
    if pictures is not None:
        figures.check()
    record = report.read(run)
    note_precision(record.config, device)
    predictions = _predictions(run, device)
    for line in page.missing(record, predictions):
        progress(f"{run}: {line}")
    written = [output or run / "report.html"]
    write_atomic(written[0], page.render(record, predictions).encode())
    if pictures is not None:
        written += figures.write(record, predictions, pictures)
    click.echo("\n".join(map(str, written)))


def _predictions(run: Path, device: str) -> Predictions | str:
    """The predictions, or why the run or its data allow none."""
    try:
        return report.predict(run, device)
    except DeviceError:
        raise
    except AdtrainError as error:
        return str(error)
