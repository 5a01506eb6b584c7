"""Loss and accuracy of a model on a split."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from adtrain import nn
from adtrain.core.array import Value, array
from adtrain.core.errors import AdtrainError
from adtrain.core.staging import stage
from adtrain.data import Images
from adtrain.passes import ALL
from adtrain.training.examples import Examples
from adtrain.training.network import Network
from adtrain.training.step import EvaluationStep, no_totals, repeated

BATCH_SIZE, ROWS = 250, 40
BATCHES_AT_ONCE = 20


class Score(NamedTuple):
    """Means over the images of a split; `accuracy` is a fraction of 1."""

    loss: float
    accuracy: float


def evaluate(
    step: EvaluationStep,
    params: nn.Params,
    statistics: nn.State,
    examples: Examples,
    name: str = "test",
    between: Callable[[], None] = lambda: None,
) -> Score:
    """The score of the model on all of `examples`, by the `evaluation_step` of an experiment or a trained model.

    `between` is called every few batches; what it raises ends the evaluation.
    Raises AdtrainError, naming the split by `name`, where the loss is no finite number.
    """
    count = len(examples)
    if not count:
        raise AdtrainError(f"the {name} split is empty")
    batches = (np.arange(start, min(start + BATCH_SIZE, count)) for start in range(0, count, BATCH_SIZE))
    totals = no_totals(examples.device)
    for piece in examples.pieces(batches, ROWS):
        totals = totals._replace(position=array(np.int64(piece.position), device=examples.device))
        for done in range(0, piece.steps, BATCHES_AT_ONCE):
            between()
            times = min(BATCHES_AT_ONCE, piece.steps - done)
            totals = repeated(step, times, (totals,), params, statistics, *piece.given)
    score = Score(float(totals.loss) / count, int(totals.correct) / count)
    if not math.isfinite(score.loss):
        raise AdtrainError(f"the loss on the {name} images is {score.loss}: the model's numbers have overflowed")
    return score


def probabilities(network: Network, params: nn.Params, statistics: nn.State, images: Images, device: str) -> np.ndarray:
    """The probability of each class, (N, classes), for images (N, C, H, W) as they were read.

    Raises AdtrainError where one is no number.
    """

    def of_batch(params: nn.Params, statistics: nn.State, batch: Value) -> Value:
        return network.probabilities(network.outputs(params, statistics, batch, nn.Mode(training=False))[0])

    # A few images are classified sooner than a Program is compiled for them.
    step = stage(of_batch, ALL) if len(images) > BATCH_SIZE else of_batch
    rows = [np.zeros((0, 0))]
    for start in range(0, len(images), BATCH_SIZE):
        batch = array(images[start : start + BATCH_SIZE], device=device)
        rows.append(step(params, statistics, batch).numpy())
    found = np.concatenate(rows[1:] or rows)
    if not np.isfinite(found).all():
        raise AdtrainError("the model's probabilities are no numbers: its weights have overflowed in training")
    return found
