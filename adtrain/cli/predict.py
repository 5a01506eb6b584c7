"""`adtrain predict`: applies a trained run to images, or to rows of tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from adtrain.cli.names import RunPath
from adtrain.cli.options import FilePath, device_option, json_option, trust_options
from adtrain.cli.output import print_json, progress, show
from adtrain.cli.precision import note_precision
from adtrain.data import DataError, idx, images
from adtrain.table import Column, render, terminal_width
from adtrain.training import Trust, model_file, rows
from adtrain.training.evaluation import predictions

INPUT = Column("input", text=True)
COLUMNS = (INPUT, Column("class", text=True), Column("probability"))
IDX_MAGIC = b"\0\0"


@click.command(short_help="Apply a trained run to images or rows of tables.")
@click.argument("run", type=RunPath())
@click.argument("paths", metavar="INPUT...", nargs=-1, required=True, type=FilePath())
@device_option
@trust_options
@json_option
def command(run: Path, paths: tuple[Path, ...], device: str, trust: Trust, as_json: bool) -> None:
    """Classify images or rows with the run in the folder RUN; print the best class of each, and its probability.

    A run that predicts numbers prints those in their original units; one with several labels, their probabilities.

    An INPUT is a PNG or JPEG file, which is converted to grey or RGB and resized as the run requires, or an IDX file
    (optionally gzip-compressed) with images of the size that the run was trained on. It is a CSV or TSV table with the
    columns that the run was trained on, in any order; other columns are ignored. Or it is an NPZ file with rows or
    images in the array X or images.
    """
    trained = model_file.load(run, device, trust)
    note_precision(trained.config, device)
    found = [(path, *read(path, trained)) for path in paths]
    results, cells = [], []
    for path, batch, indices in found:
        outputs = predictions(trained.network, trained.params, trained.statistics, batch, device)
        for i, row in zip(indices.tolist(), outputs, strict=True):
            result, shown = _values(trained, row) if trained.targets else _class(trained, row)
            results.append({"file": str(path), "index": i, **result})
            cells.append([str(path) if len(batch) == 1 else f"{path}[{i}]", *shown])
    if as_json:
        print_json(results)
        return
    columns = (INPUT, *map(Column, trained.targets)) if trained.targets else COLUMNS
    show(*render(columns, cells, terminal_width()))


def _class(trained: model_file.TrainedModel, row: np.ndarray) -> tuple[dict[str, Any], list[str]]:
    """The most probable class and its probability: as JSON values, and as cells of the table."""
    best = int(row.argmax())
    label = trained.classes[best] if best < len(trained.classes) else str(best)
    return {"class": label, "probability": float(row[best])}, [label, f"{row[best]:.2%}"]


def _values(trained: model_file.TrainedModel, row: np.ndarray) -> tuple[dict[str, Any], list[str]]:
    """The predicted numbers, or the probability of each label: as JSON values, and as cells of the table."""
    return {"predicted": dict(zip(trained.targets, row.tolist(), strict=True))}, [f"{x:.6g}" for x in row]


def read(path: Path, trained: model_file.TrainedModel) -> rows.Inputs:
    """The images or rows of a file in the run's shape and dtype. Prints a note if an image is resized.

    Raises DataError where the file contains none, or an array of another shape or dtype.
    """
    if path.suffix.lower() in rows.SUFFIXES:
        return rows.read(path, trained)
    images = read_images(path, trained)
    return rows.Inputs(images, np.arange(len(images)))


def read_images(path: Path, trained: model_file.TrainedModel) -> np.ndarray:
    """The images of a PNG, JPEG or IDX file, (N, C, H, W); see `read`."""
    shape, dtype = trained.image_shape, np.dtype(np.float32 if trained.network.scale == 1 else np.uint8)
    with idx.opened(path) as stream:
        is_idx = stream.read(2) == IDX_MAGIC
    if not is_idx and dtype != np.uint8:
        raise DataError(f"{path}: the run was trained on float32 numbers, expected an IDX file of them")
    if not is_idx:
        channels, height, width = shape
        image = images.read_image(path, channels)
        if image.shape != shape:
            progress(f"{path}: resized from {image.shape[1]} x {image.shape[2]} to {height} x {width} pixels")
            image = images.resized(image, height, width)
        return image[np.newaxis]
    found = np.asarray(idx.read(path))
    batch = found.reshape(len(found), 1, *found.shape[1:]) if found.ndim == 3 else found
    if batch.dtype != dtype or batch.shape[1:] != shape:
        raise DataError(
            f"{path}: found {found.dtype}{list(found.shape)}, expected images {dtype}[N, {', '.join(map(str, shape))}]"
        )
    return batch
