"""A model with what stands before and after it: pixels to inputs, outputs and labels to a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from adtrain import config, nn, ops
from adtrain.augment import Mixed
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

    @property
    def unit(self) -> np.ndarray:
        """What one unit of the model's input is in those of the images, for each channel: (C, 1, 1)."""
        return self.scale * _by_channel(self.std)

    def inputs(self, images: Value) -> Value:
        """Images (N, C, H, W) to normalised numbers (N, *input_shape)."""
        with scope("input"):
            scale, shift = 1 / self.unit, -_by_channel(self.mean) / _by_channel(self.std)
            pixels = ops.astype(images, self.dtype)
            normalized = pixels * scale.astype(self.dtype) + shift.astype(self.dtype)
            return ops.reshape(normalized, (images.shape[0], *self.input_shape))

    def outputs(self, params: nn.Params, statistics: nn.State, images: Value, mode: nn.Mode) -> tuple[Value, nn.State]:
        """The model's outputs (N, classes) for images (N, C, H, W), and the new running statistics."""
        with ops.matmul_precision(self.products):
            return self.model(params, statistics, self.inputs(images), mode)

    def loss_of(self, outputs: Value, labels: Value, mixed: Mixed | None = None) -> Value:
        """The mean loss, shape (), of outputs (N, classes) and labels (N,), and of those of what was mixed in.

        Losses of classes are weighted by the shares; losses of real numbers get rows that hold the shares.
        """
        with scope("loss"):
            targets = self._targets(outputs, labels)
            if mixed is None:
                return self.loss(outputs, targets)
            others, share = self._targets(outputs, mixed.labels), mixed.share
            if self.one_hot:
                return self.loss(outputs, targets * share + others * (1.0 - share))
            return self.loss(outputs, targets) * share + self.loss(outputs, others) * (1.0 - share)

    def _targets(self, outputs: Value, labels: Value) -> Value:
        return ops.one_hot(labels, outputs.shape[1], self.dtype) if self.one_hot else labels


def _by_channel(numbers: tuple[float, ...]) -> np.ndarray:
    return np.array(numbers).reshape(-1, 1, 1)


def correct(outputs: Value, labels: Value) -> Value:
    """How many rows of outputs (N, classes) are largest at their label (N,): int64, shape ()."""
    with scope("accuracy"):
        return ops.sum(ops.equal(ops.argmax(outputs, axis=1), labels))


def within_bounds(outputs: Value) -> Value:
    """Outputs of a model trained towards 0 and 1, as probabilities."""
    return ops.clip(outputs, 0.0, 1.0)


def _probabilities(loss: str) -> Callable[[Value], Value]:
    """What the outputs of a model trained with `loss` say about the classes."""
    if loss in CLASSIFICATION:
        return ops.softmax  # which leaves exp(log-probabilities) as they are
    return ops.sigmoid if loss == "binary_cross_entropy_with_logits" else within_bounds


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
