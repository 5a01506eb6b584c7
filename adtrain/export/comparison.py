"""Compares predictions of an exported network with those of the original one, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from adtrain import nn
from adtrain.core.array import Value, array
from adtrain.core.errors import AdtrainError
from adtrain.core.staging import stage
from adtrain.data import Split
from adtrain.passes import ALL
from adtrain.training import TrainedModel
from adtrain.training.evaluation import BATCH_SIZE
from adtrain.training.tasks import Multilabel, Regression, Task

VALUE_TOLERANCE = 1e-3


class Comparison(NamedTuple):
    """Numbers of `images` and of those with a `different` class or label, and the largest differences of each output.

    Differences are absolute. Predicted numbers count as different beyond a relative tolerance of VALUE_TOLERANCE.
    """

    images: int
    different: int
    outputs: dict[str, float]


def compare(
    run: Callable[[np.ndarray], Sequence[np.ndarray]], names: Sequence[str], trained: TrainedModel, examples: Split
) -> Comparison:
    """Run the exported network, `run`, and the original one on all images.

    `run` gives the arrays `names`, which are the outputs (N, ...) and the task's predictions, or the latter only, for
    images before normalisation, (N, C, H, W). Raises AdtrainError where a number of either is NaN or infinite.
    """
    network = trained.network

    def forward(params: nn.Params, statistics: nn.State, batch: Value) -> tuple[Value, ...]:
        outputs, _ = network.outputs(params, statistics, batch, nn.Mode(training=False))
        return (outputs, network.task.predictions(outputs))[-len(names) :]

    ours = stage(forward, ALL)
    different, largest = 0, np.zeros(len(names))
    for start in range(0, len(examples), BATCH_SIZE):
        batch = np.ascontiguousarray(examples.images[start : start + BATCH_SIZE])
        expected = [x.numpy() for x in ours(trained.params, trained.statistics, array(batch))]
        found = run(network.original(batch))
        if not all(np.isfinite(x).all() for x in (*found, *expected)):
            raise AdtrainError("the model's outputs are NaN or infinite: its weights overflowed in training")
        different += int(_different(network.task, found[0], expected[0], names[0]).sum())
        gaps = [np.abs(x - y).max() for x, y in zip(found, expected, strict=True)]
        largest = np.maximum(largest, gaps)
    return Comparison(len(examples), different, dict(zip(names, largest.tolist(), strict=True)))


def _different(task: Task, found: np.ndarray, expected: np.ndarray, name: str) -> np.ndarray:
    """Whether the predictions for each image differ: bool (N,)."""
    if isinstance(task, Regression):
        scale = np.maximum(np.abs(expected), np.array(task.std))
        return (np.abs(found - expected) > VALUE_TOLERANCE * scale).any(axis=1)
    if isinstance(task, Multilabel):
        threshold = 0.5 if name == "probabilities" else 0
        return ((found > threshold) != (expected > threshold)).any(axis=1)
    chosen = (x.argmax(axis=-1).reshape(len(x), -1) for x in (found, expected))
    return np.not_equal(*chosen).any(axis=1)
