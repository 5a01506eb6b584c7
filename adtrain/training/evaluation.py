"""Loss and accuracy of a model on a split."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from adtrain import nn
from adtrain.config.values import Measured, Probability
from adtrain.core.array import Value, array
from adtrain.core.errors import AdtrainError
from adtrain.core.staging import stage
from adtrain.data import Images
from adtrain.passes import ALL
from adtrain.training.examples import Examples
from adtrain.training.network import Network
from adtrain.training.step import EvaluationStep, repeated, zero_totals

BATCH_SIZE, ROWS = 250, 40
BATCHES_AT_ONCE = 20


class Score(NamedTuple):
    """Means over the images of a split; `accuracy` is a fraction of 1."""

    loss: Measured
    accuracy: Probability


def evaluate(
    step: EvaluationStep,
    params: nn.Params,
    statistics: nn.State,
    examples: Examples,
    name: str = "test",
    before_batches: Callable[[], None] = lambda: None,
) -> Score:
    """The score of the model on all of `examples`; `step` is the `evaluation_step` of an experiment or a trained model.

    `before_batches` is called before every BATCHES_AT_ONCE batches. Its exceptions end the evaluation.
    Raises AdtrainError, which names the split by `name`, where the split is empty or the loss is not finite.
    """
    count = len(examples)
    if not count:
        raise AdtrainError(f"the {name} split is empty")
    batches = (np.arange(start, min(start + BATCH_SIZE, count)) for start in range(0, count, BATCH_SIZE))
    totals = zero_totals(examples.device)
    for group in examples.groups(batches, ROWS):
        totals = totals._replace(position=array(np.int64(group.position), device=examples.device))
        for done in range(0, group.steps, BATCHES_AT_ONCE):
            before_batches()
            times = min(BATCHES_AT_ONCE, group.steps - done)
            totals = repeated(step, times, (totals,), params, statistics, *group.inputs)
    score = Score(float(totals.loss) / count, int(totals.correct) / count)
    if not math.isfinite(score.loss):
        raise AdtrainError(f"the loss on the {name} images is {score.loss}: the model's numbers have overflowed")
    return score


def probabilities(network: Network, params: nn.Params, statistics: nn.State, images: Images, device: str) -> np.ndarray:
    """The probability of each class, (N, classes), for images (N, C, H, W) before normalisation.

    Raises AdtrainError where one is NaN or infinite.
    """

    def of_batch(params: nn.Params, statistics: nn.State, batch: Value) -> Value:
        return network.probabilities(network.outputs(params, statistics, batch, nn.Mode(training=False))[0])

    # For a few images, compiling a Program takes longer than running the operations one by one.
    step = stage(of_batch, ALL) if len(images) > BATCH_SIZE else of_batch
    rows = [np.zeros((0, 0))]
    for start in range(0, len(images), BATCH_SIZE):
        batch = array(images[start : start + BATCH_SIZE], device=device)
        rows.append(step(params, statistics, batch).numpy())
    found = np.concatenate(rows[1:] or rows)
    if not np.isfinite(found).all():
        raise AdtrainError("the model's probabilities are NaN or infinite: its weights overflowed in training")
    return found
