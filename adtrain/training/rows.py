"""Rows of CSV, TSV and NPZ files as inputs of a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from adtrain.data import DataError, csv_table, npz
from adtrain.training.model_file import TrainedModel
from adtrain.training.preparation import data_options

SUFFIXES = (".csv", ".tsv", ".npz")


class Inputs(NamedTuple):
    """Images (N, C, H, W) in the type that a model was trained on, and their int64 indices (N,) in the file."""

    images: np.ndarray
    indices: np.ndarray


def read(path: Path, trained: TrainedModel) -> Inputs:
    """The rows of the file; its suffix is one of SUFFIXES. Labels are not needed, and ignored.

    The rows of a table become features as in training: its columns are found by their names. Warns about categories
    that the training rows do not have, and about rows that `data.missing: drop` leaves out.

    Raises DataError where the file does not have rows of the kind that the model was trained on.
    """
    options = data_options(trained.config.data)
    if path.suffix.lower() == ".npz":
        images = np.asarray(npz.read_images(path, options))
        return Inputs(_typed(images, path, trained), np.arange(len(images)))
    if trained.encoder is None:
        raise DataError(f"{path}: found a table, but the run was not trained on one; expected images, or rows in .npz")
    cells = csv_table.read_rows(path, options, trained.encoder.columns)
    return Inputs(
        _typed(trained.encoder.images(cells.values, cells.columns, str(path), options), path, trained), cells.rows
    )


def _typed(images: np.ndarray, path: Path, trained: TrainedModel) -> np.ndarray:
    """The images in the type of the training images, after a check of their shape and numbers."""
    found, expected = list(images.shape[1:]), list(trained.image_shape)
    if found != expected:
        raise DataError(f"{path}: found rows of shape {found}, expected {expected} as in training")
    finite = np.isfinite(images).reshape(len(images), -1).all(axis=1)
    if not finite.all():
        raise DataError(f"{path}: found a number that is not finite in row {finite.argmin()}, expected finite ones")
    if trained.network.scale != 1 and images.dtype != np.uint8:
        raise DataError(f"{path}: found other numbers, expected integers from 0 to 255 as in training")
    return images.astype(np.uint8 if trained.network.scale != 1 else np.float32, copy=False)
