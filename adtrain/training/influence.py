"""Influence of training examples on the losses of test examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adtrain.core import tree
from adtrain.core.array import Value, array
from adtrain.core.errors import AdtrainError
from adtrain.core.forward import jvp
from adtrain.core.staging import stage
from adtrain.core.vmap import vmap
from adtrain.curvature import per_example_grad
from adtrain.data import Split
from adtrain.passes import ALL
from adtrain.training.evaluation import Trained, batch_size_of
from adtrain.training.tasks import Solution

CHUNK_ELEMENTS = 1 << 25
"""The elements of the gradients of test examples that are in memory at a time."""


@dataclass(frozen=True)
class Influenced:
    """A test example with a high loss, and the training examples that change it most.

    Attributes:
        example: its index in the test part.
        helpful, harmful: indices in the training part with their influence: positive ones from the largest on, and
            negative ones from the smallest on.
    """

    example: int
    loss: float
    helpful: Sequence[tuple[int, float]]
    harmful: Sequence[tuple[int, float]]


def influence(trained: Trained, train: Split, test: Split, count: int, shown: int, device: str) -> list[Influenced]:
    """The `count` test examples with the highest losses, and for each at most `shown` examples of both kinds.

    The influence of a training example z on a test example z' is the dot product of the gradients of their losses by
    the parameters (TracIn with the last checkpoint: G. Pruthi et al.: "Estimating training data influence by tracing
    gradient descent", 2020). A step of gradient descent on z alone with the small learning rate r lowers the loss of z'
    by r times the influence. The gradient of z' is computed once. The product with the gradient of z is the derivative
    of the loss of z in its direction, by forward mode, so no gradient of a training example is computed.

    Raises AdtrainError for equations, whose points have no loss of their own, and for a part without examples.
    """
    network, params, others = trained
    if isinstance(network.task, Solution):
        raise AdtrainError("influence: the run solves equations, expected one on examples with a loss each")
    for name, split in (("training", train), ("test", test)):
        if not len(split):
            raise AdtrainError(f"influence: the {name} part is empty, expected at least one example")

    def of_one(params: Any, image: Value, label: Value) -> Value:
        return network.curvature.loss_of_one(params, others, image, label)

    def losses(params: Any, images: Value, labels: Value) -> Value:
        return vmap(of_one, (None, 0, 0))(params, images, labels)

    def products(params: Any, directions: Any, images: Value, labels: Value) -> Value:
        along = lambda v: jvp(lambda p: losses(p, images, labels), (params,), (v,))[1]  # noqa: E731
        return vmap(along)(directions)

    size = batch_size_of(network.task)
    found = in_batches(test, size, device, stage(losses, ALL), params)
    worst = np.argsort(-found, kind="stable")[:count]
    gradients, changes = stage(per_example_grad(of_one), ALL), stage(products, ALL)
    at_once = max(1, CHUNK_ELEMENTS // max(1, sum(x.size for x in tree.leaves(params))))
    rows: list[np.ndarray] = []
    for start in range(0, len(worst), at_once):
        chosen = worst[start : start + at_once]
        directions = gradients(params, *(rows_on(x, chosen, device) for x in (test.images, test.labels)))
        rows += list(in_batches(train, size, device, changes, params, directions))
    return [
        Influenced(int(i), float(found[i]), most_influential(row, shown, True), most_influential(row, shown, False))
        for i, row in zip(worst, rows, strict=True)
    ]


def in_batches(split: Split, size: int, device: str, f: Callable[..., Value], *args: Any) -> np.ndarray:
    """The results (..., examples) in float64 of a function of `args`, images and labels, for batches of a split."""
    batches = [np.arange(start, min(start + size, len(split))) for start in range(0, len(split), size)]
    found = [f(*args, *(rows_on(x, batch, device) for x in (split.images, split.labels))).numpy() for batch in batches]
    return np.concatenate(found, axis=-1).astype(np.float64)


def rows_on(x: Any, chosen: np.ndarray, device: str) -> Value:
    """The rows `chosen` of images or labels, on the device."""
    return array(np.asarray(x[chosen]), device=device)


def most_influential(row: np.ndarray, shown: int, helpful: bool) -> list[tuple[int, float]]:
    """Of a row of influences the largest positive ones, or the most negative ones, with their indices."""
    order = np.argsort(-row if helpful else row, kind="stable")[:shown]
    return [(int(i), float(row[i])) for i in order if (row[i] > 0) == helpful and row[i] != 0]
