"""Files and rows in memory as inputs of a trained model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from adtrain.data import DataError, csv_table, digit_image, formats, idx, images, table_encoder
from adtrain.data.errors import warn
from adtrain.data.part import Cells
from adtrain.data.points import warn_outside
from adtrain.data.statistics import PIXEL_MAX, as_float32
from adtrain.training.model_file import TrainedModel

IDX_MAGIC = b"\0\0"
FIELD_INTERVAL = (0.0, 1.0)
"""The interval of each coordinate of a neural field."""
MNIST = "mnist"
"""The data set whose images were made as `digit_image` makes them."""


Choice: TypeAlias = Literal["auto", "yes", "no"]


@dataclass(frozen=True)
class ImageOptions:
    """What is done to PNG and JPEG images before they are predicted.

    Attributes:
        invert: "auto" inverts grey images that look inverted compared with the training images, with a warning.
        center: "auto" scales and centres digits, see `digit_image`, if the training images are MNIST's and the file has
            another size than those.
    """

    invert: Choice = "auto"
    center: Choice = "auto"


class Inputs(NamedTuple):
    """Images (N, C, H, W) in the type that a model was trained on, and their int64 indices (N,) in the file."""

    images: np.ndarray
    indices: np.ndarray


def files(path: Path) -> list[Path]:
    """`path`, or if it is a folder, all PNG and JPEG files below it: sorted, without hidden ones.

    Raises DataError for a folder without such files.
    """
    if not path.is_dir():
        return [path]
    named = (file for file in path.rglob("*") if file.suffix.lower() in images.SUFFIXES and file.is_file())
    found = sorted(x for x in named if not any(part.startswith(".") for part in x.relative_to(path).parts))
    if not found:
        raise DataError(f"{path}: found a folder without images, expected PNG or JPEG files")
    return found


def warn_of_changes(paths: Sequence[Path], changes: str) -> None:
    """Log what was done to the images in these files."""
    others = f" and {len(paths) - 1:,} more" if len(paths) > 1 else ""
    warn(f"{paths[0]}{others}", changes)


def read(
    path: Path,
    trained: TrainedModel,
    options: ImageOptions = ImageOptions(),
    changed: Callable[[Sequence[Path], str], object] = warn_of_changes,
) -> Inputs:
    """The images or rows of a file: PNG, JPEG, IDX (optionally gzip-compressed), or a format that has `read_rows`.

    Labels are not needed, and ignored. The rows of a table become features as in training: its columns are found by
    their names. Warns about categories that the training rows do not have, and about rows that `data.missing: drop`
    leaves out. `changed` is told of an image that is resized or inverted.

    Raises DataError where the file does not have images or rows of the kind that the model was trained on.
    """
    if trained.config.data.is_text:
        raise DataError(f"{path}: the run was trained on text; adtrain predict reads text files")
    given = trained.config.data.options
    found_formats = formats.of_name(path), formats.of_name(path, given.format)
    read_rows = next((x.read_rows for x in found_formats if x is not None and x.read_rows is not None), None)
    if read_rows is not None:
        found = read_rows(path, given, trained.known)
        if isinstance(found, Cells):
            return _encoded(found, str(path), trained)
        return Inputs(_typed(found, str(path), trained), np.arange(len(found)))
    batch = _read_images(path, trained, options, changed)
    return Inputs(batch, np.arange(len(batch)))


def dropped_columns(path: Path, trained: TrainedModel) -> dict[str, list[str]]:
    """The texts of a table's columns that `data.drop` lists, for each row of the file; none for other formats."""
    given, known = trained.config.data.options, trained.known.columns
    is_table = csv_table.FORMAT in (formats.of_name(path), formats.of_name(path, given.format))
    return csv_table.read_dropped(path, given, known) if is_table and known is not None else {}


def of_rows(rows: Any, trained: TrainedModel) -> Inputs:
    """The rows of a table in memory, see `table_encoder.rows_in_memory`, as `read` returns those of a file.

    Raises DataError as `read` does.
    """
    if trained.encoder is None:
        raise DataError(f"{table_encoder.PLACE}: found a table, but the run was not trained on one; expected an array")
    cells = table_encoder.rows_in_memory(rows, trained.config.data.options, trained.encoder.columns)
    return _encoded(cells, table_encoder.PLACE, trained)


def _encoded(cells: Cells, place: str, trained: TrainedModel) -> Inputs:
    assert trained.encoder is not None
    features = trained.encoder.images(cells.values, cells.columns, place, trained.config.data.options)
    return Inputs(_typed(features, place, trained), cells.rows)


def _typed(images: np.ndarray, place: str, trained: TrainedModel) -> np.ndarray:
    """The images in the type of the training images, after a check of their shape and numbers."""
    found, expected = list(images.shape[1:]), list(trained.image_shape)
    if found != expected:
        raise DataError(f"{place}: found rows of shape {found}, expected {expected} as in training")
    return stored(images, place, trained)


def warn_of_places(images: np.ndarray, place: str, trained: TrainedModel) -> None:
    """Warn of points outside the box in which a field or a solution was trained, where outputs mean nothing."""
    data = trained.config.data
    if data.field is None and data.points is None:
        return
    count = trained.image_shape[0]
    box = [FIELD_INTERVAL] * count if data.points is None else list(data.points.values())
    warn_outside(images.reshape(-1, count), box, place, "the network was trained inside only")


def stored(images: np.ndarray, place: str, trained: TrainedModel) -> np.ndarray:
    """The images as those of the training are stored, with a warning as that of `warn_of_places`.

    Raises DataError where a number is not finite, or only those of the training are pixels.
    """
    finite = np.isfinite(images).all(axis=tuple(range(1, images.ndim)))
    if not finite.all():
        raise DataError(f"{place}: found a number that is not finite in row {finite.argmin()}, expected finite ones")
    warn_of_places(images, place, trained)
    if trained.network.image_dtype != np.uint8:
        return np.asarray(as_float32(images, trained.network.offset, place))
    if images.dtype != np.uint8:
        raise DataError(f"{place}: found other numbers, expected integers from 0 to 255 as in training")
    return images


def _read_images(
    path: Path, trained: TrainedModel, options: ImageOptions, changed: Callable[[Sequence[Path], str], object]
) -> np.ndarray:
    """The images of a PNG, JPEG or IDX file, (N, C, H, W)."""
    shape, dtype = trained.image_shape, trained.network.image_dtype
    with idx.opened(path) as stream:
        is_idx = stream.read(2) == IDX_MAGIC
    if not is_idx:
        if trained.encoder is not None:
            raise DataError(f"{path}: found no table, expected a .csv or .tsv file, or rows in .npz or IDX")
        if dtype != np.uint8:
            raise DataError(f"{path}: the run was trained on float32 numbers, expected an IDX file of them")
        image, changes = _prepared(path, images.read_image(path, shape[0]), trained, options)
        if changes:
            changed([path], changes)
        return image[np.newaxis]
    found = np.asarray(idx.read(path))
    batch = found.reshape(len(found), 1, *found.shape[1:]) if found.ndim == 3 else found
    if batch.dtype != dtype or batch.shape[1:] != shape:
        raise DataError(
            f"{path}: found {found.dtype}{list(found.shape)}, expected images {dtype}[N, {', '.join(map(str, shape))}]"
        )
    return stored(batch, str(path), trained)


def _prepared(path: Path, image: np.ndarray, trained: TrainedModel, options: ImageOptions) -> tuple[np.ndarray, str]:
    """The image, uint8 (C, H, W), in the size and polarity of the training images, and what was done to it."""
    channels, height, width = trained.image_shape
    differs, changes = image.shape != trained.image_shape, []
    inverted = options.invert == "yes" or (options.invert == "auto" and _looks_inverted(image, trained))
    was_light = digit_image.has_light_background(image)
    if centers := options.center == "yes" or (options.center == "auto" and differs and is_of_mnist(trained)):
        if channels != 1:
            raise DataError(f"{path}: found {channels} channels, expected a network for grey images to center digits")
        ink: digit_image.Ink = "auto" if options.invert == "auto" else "dark" if inverted else "light"
        digit = digit_image.centred(image, height, width, str(path), ink)
        image, inverted, was_light = digit.image, digit.was_dark, digit.was_dark
    elif inverted:
        image = PIXEL_MAX - image
    if inverted:
        background = "light" if was_light else "dark"
        reason = f", because its background is {background}, unlike in training (--invert no keeps it)"
        changes.append("inverted" + (reason if options.invert == "auto" else ""))
    if centers:
        changes.append("digit scaled and centred as in MNIST")
        if digit.doubt:
            changes.append(f"it may not show one digit on plain paper: {digit.doubt}")
    elif differs:
        changes.append(f"resized to {height} x {width} pixels")
        image = images.resized(image, height, width)
    return image, "; ".join(changes)


def is_of_mnist(trained: TrainedModel) -> bool:
    dataset = trained.config.data.dataset
    return dataset is not None and dataset.kind == MNIST


def _looks_inverted(image: np.ndarray, trained: TrainedModel) -> bool:
    """See `digit_image.looks_inverted`. False if the model does not store the mean of grey training images."""
    if trained.image_shape[0] != 1 or not trained.config.data.normalize:
        return False
    return digit_image.looks_inverted(image, trained.network.mean[0])
