"""A model with what stands before and after it: pixels to inputs, outputs and labels to a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from adtrain import config, nn, ops
from adtrain.config import Config
from adtrain.config.build import CLASSIFICATION
from adtrain.core.array import Value
from adtrain.core.precision import FULL, PRECISIONS
from adtrain.core.scope import scope


@dataclass(frozen=True)
class Network:
    """Images to a loss, as pure functions of values.

    All numbers are of `dtype`; `products` is the `ops.matmul_precision` of the model's products and their derivatives.
    Images are divided by `scale`, 255 for uint8 and 1 for float32; then `mean` and `std`, one a channel, are subtracted
    and divided by. `loss` takes integer labels; with `one_hot` it takes rows that are 1 at the label, as losses of real
    numbers do. `probabilities` makes those of the classes of outputs (N, classes).
    """

    model: nn.Sequential
    input_shape: nn.Shape
    dtype: np.dtype[Any]
    products: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float
    loss: Callable[[Value, Value], Value]
    one_hot: bool
    probabilities: Callable[[Value], Value]

    def inputs(self, images: Value) -> Value:
        """Images (N, C, H, W) to normalised numbers (N, *input_shape)."""
        with scope("input"):
            std, mean = (np.array(x).reshape(-1, 1, 1) for x in (self.std, self.mean))
            scale, shift = 1 / (self.scale * std), -mean / std
            pixels = ops.astype(images, self.dtype)
            normalized = pixels * scale.astype(self.dtype) + shift.astype(self.dtype)
            return ops.reshape(normalized, (images.shape[0], *self.input_shape))

    def outputs(self, params: nn.Params, statistics: nn.State, images: Value, mode: nn.Mode) -> tuple[Value, nn.State]:
        """The model's outputs (N, classes) for images (N, C, H, W), and the new running statistics."""
        with ops.matmul_precision(self.products):
            return self.model(params, statistics, self.inputs(images), mode)

    def loss_of(self, outputs: Value, labels: Value) -> Value:
        """The mean loss, shape (), of outputs (N, classes) and labels (N,)."""
        with scope("loss"):
            targets = ops.one_hot(labels, outputs.shape[1], self.dtype) if self.one_hot else labels
            return self.loss(outputs, targets)


def correct(outputs: Value, labels: Value) -> Value:
    """How many rows of outputs (N, classes) are largest at their label (N,): int64, shape ()."""
    with scope("accuracy"):
        return ops.sum(ops.equal(ops.argmax(outputs, axis=1), labels))


def _within_bounds(outputs: Value) -> Value:
    return ops.clip(outputs, 0.0, 1.0)


def _probabilities(loss: str) -> Callable[[Value], Value]:
    """What the outputs of a model trained with `loss` say about the classes."""
    if loss in CLASSIFICATION:
        return ops.softmax  # which leaves exp(log-probabilities) as they are
    return ops.sigmoid if loss == "binary_cross_entropy_with_logits" else _within_bounds


def build(cfg: Config, mean: tuple[float, ...], std: tuple[float, ...], scale: float) -> Network:
    """The network that a config describes, for such images. Raises ConfigError where its layers do not fit together."""
    if not cfg.data.normalize:
        mean, std = (0.0,) * len(mean), (1.0,) * len(std)
    precision = cfg.training.precision
    return Network(
        model=config.build.model(cfg),
        input_shape=cfg.model.input,
        dtype=np.dtype(np.float32 if precision in PRECISIONS else precision),
        products=precision if precision in PRECISIONS else FULL,
        mean=mean,
        std=std,
        scale=scale,
        loss=config.build.loss(cfg),
        one_hot=cfg.loss.kind not in CLASSIFICATION,
        probabilities=_probabilities(cfg.loss.kind),
    )
