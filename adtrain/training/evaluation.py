"""Loss and accuracy of a model on a split."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from adtrain import nn
from adtrain.core import tree
from adtrain.core.array import Value, array
from adtrain.core.errors import AdtrainError
from adtrain.core.staging import stage
from adtrain.data import Split
from adtrain.passes import SIMPLIFY
from adtrain.training.network import Network
from adtrain.training.step import Totals, evaluation_step

BATCH_SIZE = 250


class Score(NamedTuple):
    """Means over the images of a split; `accuracy` is a fraction of 1."""

    loss: float
    accuracy: float


def evaluate(
    network: Network, params: nn.Params, statistics: nn.State, split: Split, device: str, name: str = "test"
) -> Score:
    """The score of the model on every image of `split`.

    Raises AdtrainError, naming the split by `name`, where the loss is no finite number.
    """
    step = stage(evaluation_step(network), SIMPLIFY)
    totals: Totals | None = None
    for start in range(0, len(split), BATCH_SIZE):
        images, labels = on_device(split, np.arange(start, min(start + BATCH_SIZE, len(split))), device)
        batch = step(params, statistics, images, labels)
        totals = batch if totals is None else tree.map(lambda a, b: a + b, totals, batch)
    if totals is None:
        raise AdtrainError(f"the {name} split is empty")
    score = Score(float(totals.loss) / len(split), int(totals.correct) / len(split))
    if not math.isfinite(score.loss):
        raise AdtrainError(f"the loss on the {name} images is {score.loss}: the model's numbers have overflowed")
    return score


def probabilities(
    network: Network, params: nn.Params, statistics: nn.State, images: np.ndarray, device: str
) -> np.ndarray:
    """The probability of each class, (N, classes), for images uint8 (N, C, H, W).

    Raises AdtrainError where one is no number.
    """
    rows = [np.zeros((0, 0))]
    for start in range(0, len(images), BATCH_SIZE):
        batch = array(images[start : start + BATCH_SIZE], device=device)
        outputs, _ = network.outputs(params, statistics, batch, nn.Mode(training=False))
        rows.append(network.probabilities(outputs).numpy())
    found = np.concatenate(rows[1:] or rows)
    if not np.isfinite(found).all():
        raise AdtrainError("the model's probabilities are no numbers: its weights have overflowed in training")
    return found


def on_device(split: Split, indices: np.ndarray, device: str) -> tuple[Value, Value]:
    """The images uint8 (N, C, H, W) and labels int64 (N,) at `indices` as arrays on `device`."""
    batch = split.take(indices)
    return array(batch.images, device=device), array(batch.labels, device=device)
