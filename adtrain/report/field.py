"""What a page shows of a neural field: the learnt image or a slice of the learnt array, the truth, and the error."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from adtrain.report.classes import data_url, signed
from adtrain.report.predictions import FieldPredictions
from adtrain.training.scores import value_text

MOST_PIXELS = 1024
"""The most rows and columns of a picture. Of larger arrays it has every second or third one, and so on."""


class Picture(NamedTuple):
    """A picture: its title, what its colours mean, and its address."""

    title: str
    legend: str
    address: str


def pictures(predictions: FieldPredictions) -> list[Picture]:
    """The network's picture, the truth and the error, of the image or the middle slice of its last two axes."""
    true, found = (_slice(x) for x in (predictions.true, predictions.found))
    low, high = (0.0, 1.0) if predictions.is_image else (float(true.min()), float(true.max()))
    scale = f"black {low:.3g}, white {high:.3g}"
    error = found - true
    largest = np.abs(error).max()
    return [
        Picture("network", f"PSNR {value_text('psnr', predictions.psnr)}", data_url(_shown(found, low, high))),
        Picture("truth", "" if predictions.is_image else scale, data_url(_shown(true, low, high))),
        Picture("error", f"at most {largest:.3g}", data_url(signed(error.transpose(2, 0, 1)[np.newaxis])[0])),
    ]


def slice_text(predictions: FieldPredictions) -> str:
    """Which slice the pictures show; empty if they show all."""
    fixed = zip(predictions.axes[:-2], predictions.true.shape, strict=False)
    return ", ".join(f"{axis} = {(n // 2 + 0.5) / n:.3g}" for axis, n in fixed)


def _slice(values: np.ndarray) -> np.ndarray:
    """(H, W, outputs): the elements in the middle of all axes but the last two; one axis is a row."""
    while values.ndim > 3:
        values = values[len(values) // 2]
    values = values.reshape((1,) * (3 - values.ndim) + values.shape)
    step = -(-max(values.shape[:2]) // MOST_PIXELS)
    return values[::step, ::step].astype(np.float64)


def _shown(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """The numbers from `low` to `high` as uint8."""
    shown = np.clip((values - low) / ((high - low) or 1.0), 0, 1)
    return np.round(255 * shown).astype(np.uint8)
