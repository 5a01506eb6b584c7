"""A model with its input normalisation and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from adtrain import config, nn, ops
from adtrain.augment import Mixed
from adtrain.config import Config
from adtrain.config.build import takes_labels
from adtrain.config.specs import Spec
from adtrain.core.array import Value
from adtrain.core.precision import FULL, PRECISIONS
from adtrain.core.scope import scope


@dataclass(frozen=True)
class Network:
    """Images to a loss, as pure functions of values.

    Attributes:
        dtype: of inputs, parameters and outputs.
        products: the `ops.matmul_precision` of the model's products and their derivatives.
        mean, std: numbers per channel that normalise the images after division by `scale`.
        scale: 255 for uint8 images, 1 for float32.
        loss: maps outputs (N, classes) and targets to the mean loss.
        one_hot: whether the targets are one-hot rows (N, classes), as for regression losses, or labels (N,).
        probabilities: maps outputs (N, classes) to class probabilities.
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
        """The difference in pixel values that equals 1 in the model's input, for each channel: (C, 1, 1)."""
        return self.scale * _by_channel(self.std)

    def normalization(self) -> tuple[np.ndarray, np.ndarray]:
        """The factor and the summand for the pixels of each channel, (C, 1, 1) of `dtype`."""
        with np.errstate(all="ignore"):  # `model_file.load` refuses numbers that overflow
            factor, summand = 1 / self.unit, -_by_channel(self.mean) / _by_channel(self.std)
            return factor.astype(self.dtype), summand.astype(self.dtype)

    def inputs(self, images: Value) -> Value:
        """Normalise images (N, C, H, W) and reshape them to (N, *input_shape)."""
        with scope("input"):
            factor, summand = self.normalization()
            normalized = ops.astype(images, self.dtype) * factor + summand
            return ops.reshape(normalized, (images.shape[0], *self.input_shape))

    def outputs(self, params: nn.Params, statistics: nn.State, images: Value, mode: nn.Mode) -> tuple[Value, nn.State]:
        """The model's outputs (N, classes) for images (N, C, H, W), and the new running statistics."""
        with ops.matmul_precision(self.products):
            return self.model.forward(params, statistics, self.inputs(images), mode)

    def loss_of(self, outputs: Value, labels: Value, mixed: Mixed | None = None) -> Value:
        """The mean loss, shape (), of outputs (N, classes) for labels (N,).

        With mixup (`mixed`), a classification loss is the weighted mean of the losses for both labels; a regression
        loss gets the weighted mean of both one-hot rows as its target.
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
    """The number of rows of outputs (N, classes) whose largest element is at the label (N,): int64, shape ()."""
    with scope("accuracy"):
        return ops.sum(ops.equal(ops.argmax(outputs, axis=1), labels))


def clip_probabilities(outputs: Value) -> Value:
    """Outputs of a model whose targets were 0 and 1, clipped to that range."""
    return ops.clip(outputs, 0.0, 1.0)


def _probabilities(loss: Spec) -> Callable[[Value], Value]:
    """The function from outputs to class probabilities for a model trained with `loss`."""
    if takes_labels(loss):
        return ops.softmax  # also right for log-probabilities, whose softmax equals their exp
    return ops.sigmoid if loss.kind == "binary_cross_entropy_with_logits" else clip_probabilities


def build(cfg: Config, mean: tuple[float, ...], std: tuple[float, ...], scale: float) -> Network:
    """The network that a config describes, for images with this mean, standard deviation and scale.

    Raises ConfigError where its layers do not fit together.
    """
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
        one_hot=not takes_labels(cfg.loss),
        probabilities=_probabilities(cfg.loss),
    )
