"""A model with its input normalisation and its loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log, prod
from typing import Any

import numpy as np

from adtrain import config, nn, ops
from adtrain.augment import Batch, Mixed
from adtrain.config import Config
from adtrain.config.build import REGRESSION, is_own, takes_labels
from adtrain.core.array import Value, array
from adtrain.core.precision import FULL, PRECISIONS
from adtrain.core.trace import scope
from adtrain.curvature import Curvature
from adtrain.data.split import Images
from adtrain.data.statistics import offsets
from adtrain.training.tasks import Classification, Field, Multilabel, NextClass, NextToken, Regression, Solution, Task

WHITENING_PIXELS = 1_000_000
"""The pixels of the images from which weights are computed: those of 976 images of 32x32."""


@dataclass(frozen=True)
class Network:
    """Images to a loss, as pure functions of values.

    Attributes:
        dtype: of inputs, parameters and outputs.
        products: the `ops.matmul_precision` of the model's products and their derivatives.
        mean, std: numbers per channel that normalise the images after division by `scale`.
        scale: 255 for uint8 images, 1 for numbers, which are stored in float32 after subtraction of `offset`.
        loss: maps outputs (N, classes) and targets to the mean loss; a position of a sequence is a row.
        class_weights: the factors of the rows' losses, one for each class; None where the loss has none.
        mean_only: whether the loss has no option `reduction`, as losses of plug-ins.
        views: the changes of an image whose predictions are averaged in an evaluation; see `views_of`.
        task: what the outputs mean: the loss's targets, predictions and metrics.
    """

    model: nn.Sequential
    input_shape: nn.Shape
    dtype: np.dtype[Any]
    products: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float
    loss: Callable[..., Value]
    task: Task
    class_weights: tuple[float, ...] | None = None
    mean_only: bool = False
    views: tuple[str, ...] = ()

    @cached_property
    def synchronized(self) -> bool:
        """Whether a layer exchanges statistics between the shards of a batch: batch norm with `sync`."""
        return any(getattr(layer, "sync", False) for _, layer, _ in nn.layers(self.model, self.input_shape))

    @cached_property
    def curvature(self) -> Curvature:
        """Curvature of the loss without dropout and with the running statistics."""
        return Curvature(
            lambda params, statistics, images, labels: self.loss_of(self.evaluated(params, statistics, images), labels)
        )

    @property
    def parameter_shapes(self) -> dict[str, nn.Shape]:
        """The shapes of the parameters, by path."""
        return self.model.parameter_shapes(self.input_shape)

    @property
    def image_dtype(self) -> np.dtype[Any]:
        """The dtype of the images before normalisation: uint8 or float32."""
        return np.dtype(np.float32 if self.scale == 1 else np.uint8)

    @property
    def unit(self) -> np.ndarray:
        """The difference in pixel values that equals 1 in the model's input, for each channel: (C, 1, 1)."""
        return self.scale * _by_channel(self.std)

    @cached_property
    def offset(self) -> tuple[float, ...]:
        """What is subtracted from the numbers of each channel before they are stored; see `data.statistics`."""
        return offsets(self.mean, self.std) if self.scale == 1 else (0.0,) * len(self.mean)

    def original(self, images: np.ndarray) -> np.ndarray:
        """Stored images as they were before the subtraction of `offset`: float64 if there is one."""
        return images + _by_channel(self.offset) if any(self.offset) else images

    def normalization(self) -> tuple[np.ndarray, np.ndarray]:
        """The factor and the summand for the stored pixels of each channel, (C, 1, 1) of `dtype`."""
        with np.errstate(all="ignore"):  # `model_file.load` refuses numbers that overflow
            shift = _by_channel(self.offset) - _by_channel(self.mean)
            factor, summand = 1 / self.unit, shift / _by_channel(self.std)
            return factor.astype(self.dtype), summand.astype(self.dtype)

    def inputs(self, images: Value) -> Value:
        """Normalise images (N, C, H, W) and reshape them to (N, *input_shape)."""
        with scope("input"):
            factor, summand = self.normalization()
            normalized = ops.astype(images, self.dtype) * factor + summand
            return ops.reshape(normalized, (images.shape[0], *self.input_shape))

    def input_weights(self, images: Images) -> nn.Params:
        """The initial weights that are computed from the training images, see `nn.Module.input_weights`.

        Images with WHITENING_PIXELS pixels are taken, evenly spaced because files can have them in the order of their
        classes.
        """
        if not self.model.needs_images(self.input_shape):
            return {}
        count = min(len(images), max(1, WHITENING_PIXELS // prod(self.input_shape[-2:])))
        sample = images[np.arange(count) * len(images) // count]
        factor, summand = self.normalization()
        return self.model.input_weights(self.input_shape, sample.astype(self.dtype) * factor + summand)

    def outputs(self, params: nn.Params, statistics: nn.State, images: Value, mode: nn.Mode) -> tuple[Value, nn.State]:
        """The model's outputs (N, ..., classes) for images (N, C, H, W), and the new running statistics."""
        return self.run(params, statistics, self.inputs(images), mode)

    def run(self, params: nn.Params, state: nn.State, inputs: Value, mode: nn.Mode) -> tuple[Value, nn.State]:
        """The model's outputs for its inputs (N, *input_shape), or for one token of each sequence."""
        separator = self.task.separator if isinstance(self.task, NextToken) else None
        if separator is not None and mode.token is None:
            with scope("documents"):
                mode = replace(mode, starts=starts_of(ops.equal(inputs, float(separator))))
        with ops.matmul_precision(self.products):
            return self.model.forward(params, state, inputs, mode)

    def evaluated(self, params: nn.Params, statistics: nn.State, images: Value) -> Value:
        """The outputs for images (N, C, H, W), without dropout and with the running statistics.

        With `views` they are the logarithms of the mean probabilities of an image's views.
        """
        mode = nn.Mode(training=False)
        if not self.views:
            return self.outputs(params, statistics, images, mode)[0]
        with scope("views"):
            batch = views_of(images, self.views)
            count = batch.shape[0] // images.shape[0]
        outputs, _ = self.outputs(params, statistics, batch, mode)
        with scope("views"):
            by_view = ops.reshape(ops.log_softmax(outputs), (images.shape[0], count, outputs.shape[1]))
            return ops.logsumexp(by_view, axis=1) - log(count)

    def predictions(self, params: nn.Params, statistics: nn.State, images: Value) -> Value:
        """The task's predictions for images (N, C, H, W): see `training.evaluation.predictions`."""
        return self.task.predictions(self.evaluated(params, statistics, images))

    def training_loss(
        self,
        params: nn.Params,
        statistics: nn.State,
        batch: Batch,
        mode: nn.Mode,
        total_weight: Value | None = None,
    ) -> tuple[Value, tuple[Value, nn.State]]:
        """The mean loss of a batch in a training step, shape (), the outputs, and the new running statistics."""
        outputs, moved = self.outputs(params, statistics, batch.images, mode)
        return self.loss_of(outputs, batch.labels, batch.mixed, total_weight), (outputs, moved)

    def training_sums(self, outputs: Value, labels: Value) -> Value:
        """The task's sums of the outputs that `training_loss` returns."""
        return self.task.sums(outputs, labels)

    def kept_points(self, outputs: Value, batch: Batch, step: Value) -> Value:
        """The points with large residuals, of a network of equations."""
        raise NotImplementedError

    def evaluation_sums(
        self, params: nn.Params, statistics: nn.State, images: Value, labels: Value
    ) -> tuple[Value, Value, Value]:
        """The sums of a batch in an evaluation: both of `loss_sums`, and the task's."""
        outputs = self.evaluated(params, statistics, images)
        return *self.loss_sums(outputs, labels), self.task.sums(outputs, labels)

    def loss_of(
        self, outputs: Value, labels: Value, mixed: Mixed | None = None, total_weight: Value | None = None
    ) -> Value:
        """The mean loss, shape (), of outputs (N, classes or targets) for labels (N,) or (N, targets).

        Of sequences: outputs (N, length, classes), labels (N, length).

        With mixup (`mixed`), a classification loss is the weighted mean of the losses for both labels; another loss
        gets the weighted mean of both targets.

        With `class_weights` the mean is the sum of the weighted losses divided by the sum of the weights, or by
        `total_weight`, that of a batch of which these rows are a part. It is 0 where the weights are 0.
        """

        def mean(targets: Value) -> Value:
            if self.class_weights is None:
                return self.loss(outputs, targets)
            total = self._weight_of(targets, self.dtype) if total_weight is None else total_weight
            return self.loss(outputs, targets, reduction="sum") / ops.where(ops.equal(total, 0.0), 1.0, total)

        with scope("loss"):
            outputs = _rows(outputs)
            targets = self.task.targets(outputs, labels)
            if mixed is None:
                return mean(targets)
            others, share = self.task.targets(outputs, mixed.labels), mixed.share
            if self.task.mixes_targets:
                return mean(targets * share + others * (1.0 - share))
            return mean(targets) * share + mean(others) * (1.0 - share)

    def loss_sums(self, outputs: Value, labels: Value) -> tuple[Value, Value]:
        """The sum of the losses of a batch, and of their weights; arguments are those of `loss_of`.

        Both are float64, shape (). The sums over all batches, divided by one another, are the mean loss of a split. It
        does not depend on the order of the examples, up to rounding in float64. A loss of a plug-in only has a mean, so
        its sum is the mean times the number of rows.
        """
        with scope("loss"):
            outputs = _rows(outputs)
            targets = self.task.targets(outputs, labels)
            if self.mean_only:
                total, count = ops.astype(self.loss(outputs, targets), np.float64) * outputs.shape[0], outputs.shape[0]
            else:
                losses = ops.astype(self.loss(outputs, targets, reduction="none"), np.float64)
                total, count = ops.sum(losses), losses.size
            if self.class_weights is not None:
                return total, self._weight_of(targets, np.dtype(np.float64))
            return total, ops.full((), float(count), np.float64, outputs.device)

    def weight_of(self, labels: Value) -> Value:
        """The sum of the class weights of labels (N,) or (N, length): `dtype`, shape ()."""
        with scope("loss"):
            return self._weight_of(ops.reshape(labels, (-1,)), self.dtype)

    def _weight_of(self, labels: Value, dtype: np.dtype[Any]) -> Value:
        weights = array(np.array(self.class_weights, dtype), device=labels.device)
        return ops.sum(ops.embedding(labels, weights))


def starts_of(begins: Value) -> Value:
    """The last position, up to each one, at which a document begins, else 0: bool (N, length) to int32."""
    length = begins.shape[1]
    found = ops.where(begins, ops.arange(length, dtype="int32", device=begins.device), 0)
    distance = 1
    while distance < length:  # the maximum of 2, 4, 8, ... neighbours
        found = ops.maximum(found, ops.pad(found[:, :-distance], [(0, 0), (distance, 0)]))
        distance *= 2
    return found


def views_of(images: Value, changes: Sequence[str]) -> Value:
    """The views of each image, one after the other: images (N, C, H, W) to (N * views, C, H, W).

    The first view is the image itself. With "shift" it is also moved by one pixel to the top left, and to the bottom
    right, reflected at the border; with "flip" each view is also mirrored.
    """
    count, channels, height, width = images.shape
    places = np.arange(height * width).reshape(height, width)
    views = [places]
    if "shift" in changes:
        padded = np.pad(places, 1, mode="reflect")
        views += [padded[2:, 2:], padded[:-2, :-2]]
    if "flip" in changes:
        views += [view[:, ::-1] for view in views]
    pixels = ops.reshape(images, (count, channels, height * width))
    taken = ops.take(pixels, array(np.concatenate(views, axis=None).astype(np.uint32), device=images.device), axis=2)
    by_view = ops.reshape(taken, (count, channels, len(views), height, width))
    return ops.reshape(ops.transpose(by_view, (0, 2, 1, 3, 4)), (-1, channels, height, width))


def _rows(outputs: Value) -> Value:
    """Outputs (N, length, classes) of sequences as rows (N * length, classes); others as they are."""
    return ops.reshape(outputs, (-1, outputs.shape[-1])) if outputs.ndim > 2 else outputs


def _by_channel(numbers: tuple[float, ...]) -> np.ndarray:
    return np.array(numbers).reshape(-1, 1, 1)


def clip_probabilities(outputs: Value) -> Value:
    """Outputs of a model whose targets were 0 and 1, clipped to that range."""
    return ops.clip(outputs, 0.0, 1.0)


def task_of(
    cfg: Config,
    target_mean: tuple[float, ...],
    target_std: tuple[float, ...],
    token_bytes: Sequence[bytes] = (),
    end_of_text: int | None = None,
) -> Task:
    """The task of a config; without targets a classification.

    `token_bytes` are those of each token of a text, `end_of_text` is the token between documents.
    """
    if cfg.data.is_text:
        length = prod(cfg.model.input_shape)
        if not token_bytes:
            return NextClass(one_hot=False, predictions=ops.softmax, length=length)
        lengths = tuple(map(len, token_bytes))
        separator = end_of_text if cfg.data.options.documents == "separate" else None
        return NextToken(one_hot=False, predictions=ops.softmax, length=length, lengths=lengths, separator=separator)
    if cfg.data.points is not None:
        return Solution(target_mean, target_std, normalized=False, known=cfg.data.has_reference)
    if not target_mean:
        labels = takes_labels(cfg.loss)
        # The softmax of log-probabilities equals their exp.
        predictions = ops.softmax if labels else ops.sigmoid
        return Classification(
            one_hot=not labels, predictions=clip_probabilities if cfg.loss.kind in REGRESSION else predictions
        )
    if cfg.data.field is not None:
        return Field(target_mean, target_std, bool(cfg.data.normalize_targets), peak=cfg.data.peak or 1.0)
    if cfg.loss.kind in REGRESSION:
        return Regression(target_mean, target_std, bool(cfg.data.normalize_targets))
    return Multilabel(len(target_mean))


def build(cfg: Config, mean: tuple[float, ...], std: tuple[float, ...], scale: float, task: Task) -> Network:
    """The network that a config describes, for images with this mean, standard deviation and scale.

    Raises ConfigError where its layers do not fit together.
    """
    if not cfg.data.normalize:
        mean, std = (0.0,) * len(mean), (1.0,) * len(std)
    precision = cfg.training.precision
    return Network(
        model=config.build.model(cfg),
        input_shape=cfg.model.input_shape,
        dtype=np.dtype(np.float32 if precision in PRECISIONS else precision),
        products=precision if precision in PRECISIONS else FULL,
        mean=mean,
        std=std,
        scale=scale,
        loss=config.build.loss(cfg),
        task=task,
        class_weights=config.build.class_weights(cfg),
        mean_only=is_own(cfg.loss),
        views=tuple(cfg.data.views or ()),
    )
