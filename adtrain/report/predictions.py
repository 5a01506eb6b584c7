"""The predictions of a trained model for the test images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import prod
from pathlib import Path
from typing import TypeAlias

import numpy as np

from adtrain.config.plugged import NONE, Trust
from adtrain.config.specs import Equations
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.data import Images, Split
from adtrain.data.points import shape_of
from adtrain.metrics import confusion_matrix, psnr
from adtrain.nn import Mode
from adtrain.report.tables import LabelPredictions, NumberPredictions, TableColumns, table_columns
from adtrain.training import model_file, sampling
from adtrain.training.equations import EquationNetwork, coefficients_of
from adtrain.training.evaluation import class_names, predictions
from adtrain.training.model_file import TrainedModel
from adtrain.training.tasks import Field, Multilabel, NextClass, Regression


@dataclass(frozen=True)
class Predictions:
    """The probabilities of the classes of each image.

    Attributes:
        images: (N, C, H, W), uint8 or float32.
        labels: int64 (N,).
        classes: a name for each class of the labels and predictions.
        probabilities: (N, outputs of the network).
        filters: the weights of each output of the first layer, (outputs, C, H, W); None if its inputs are not pictures.
        columns: those of the table that the images are rows of; None for other data.
    """

    images: Images
    labels: np.ndarray
    classes: tuple[str, ...]
    probabilities: np.ndarray
    filters: np.ndarray | None = None
    columns: TableColumns | None = None

    @cached_property
    def predicted(self) -> np.ndarray:
        """The most probable class of each image: int64 (N,)."""
        return self.probabilities.argmax(axis=1)

    @cached_property
    def confusion(self) -> np.ndarray:
        """The number of images by label (row) and predicted class (column): int64 (classes, classes)."""
        return confusion_matrix(self.labels, self.predicted, len(self.classes))

    @property
    def correct(self) -> int:
        return int(np.trace(self.confusion))


@dataclass(frozen=True)
class Sample:
    """Text that the network writes."""

    text: str


@dataclass(frozen=True)
class SolutionPredictions:
    """A solution of equations at the points of the evaluation.

    Attributes:
        points: float64 (N, variables).
        values: the outputs of the network, float64 (N, outputs); `true` are the known ones, or None.
        residuals: each equation that holds inside, with its value at each point (N,).
        coefficients: the learnt coefficients by name.
    """

    variables: tuple[str, ...]
    outputs: tuple[str, ...]
    points: np.ndarray
    values: np.ndarray
    true: np.ndarray | None
    residuals: Sequence[tuple[str, np.ndarray]]
    coefficients: Mapping[str, float]

    @cached_property
    def axes(self) -> Sequence[np.ndarray] | None:
        """The coordinates along each variable, if the points are a grid of them; None for other points."""
        axes = [np.unique(x) for x in self.points.T]
        return axes if prod(map(len, axes)) == len(self.points) == len(np.unique(self.points, axis=0)) else None


@dataclass(frozen=True)
class FieldPredictions:
    """The elements of an array, true and as the network has them, float (*shape, outputs), and the PSNR of all.

    `axes` are the names of the coordinates. `is_image`: the numbers are grey values or colours in [0, 1].
    """

    axes: tuple[str, ...]
    true: np.ndarray
    found: np.ndarray
    psnr: float
    is_image: bool


AnyPredictions: TypeAlias = (
    Predictions | NumberPredictions | LabelPredictions | SolutionPredictions | FieldPredictions | Sample
)

SAMPLE_LENGTH = 500


def predict(run: Path, device: str, trust: Trust = NONE) -> AnyPredictions:
    """The predictions of the run's model for the test images of its config. A run on text writes a sample instead.

    Raises AdtrainError where the model or the data are missing, damaged, or do not fit together.
    """
    trained = model_file.load(run, device, trust)
    if isinstance(trained.network.task, NextClass):
        drawn = sampling.sample(trained, device, [sampling.prompt_classes(trained, "")])
        return Sample(*sampling.decoded_texts(trained, islice(drawn, SAMPLE_LENGTH), 1))
    test = trained.test_split()
    if isinstance(trained.network, EquationNetwork):
        return _solution(trained, trained.network, test, device)
    if isinstance(task := trained.network.task, Field):
        return _field(trained, task, test, device)
    columns = table_columns(trained, test, device)
    if isinstance(task, (Regression, Multilabel)):
        sums = trained.evaluation(test, device).sums(trained.params, trained.statistics).of_task
        if isinstance(task, Multilabel):
            return LabelPredictions(trained.targets, task.by_label(sums), columns)
        rows = predictions(trained.network, trained.params, trained.statistics, test.images, device)
        return NumberPredictions(trained.targets, test.labels, rows, task.by_target(sums, test.labels), columns)
    rows = predictions(trained.network, trained.params, trained.statistics, test.images, device)
    classes = class_names(trained.classes, rows)
    return Predictions(test.images, test.labels, classes, rows, first_filters(trained), columns)


def _solution(trained: TrainedModel, network: EquationNetwork, test: Split, device: str) -> SolutionPredictions:
    """The solution at the points of the evaluation."""
    cfg, params, statistics = trained.config, trained.params, trained.statistics
    values = predictions(network, params, statistics, test.images, device)
    assert isinstance(cfg.loss, Equations)
    inside = [
        (written.equation, term) for written, term in zip(cfg.loss.terms, network.terms, strict=True) if not term.fixed
    ]
    images = array(np.asarray(test.images, network.dtype), device=device)
    found = network.residuals(params, statistics, images, Mode(training=False), [term for _, term in inside])
    return SolutionPredictions(
        network.names.variables,
        network.names.outputs,
        network.original(np.asarray(test.images)[:, :, :1, :1]).reshape(len(test), -1).astype(np.float64),
        values,
        np.asarray(test.labels) if network.task.known else None,
        [(text, x.numpy().astype(np.float64)) for (text, _), x in zip(inside, found, strict=True)],
        coefficients_of(params),
    )


def _field(trained: TrainedModel, task: Field, test: Split, device: str) -> FieldPredictions:
    """The elements of the array that the network has learnt."""
    found = predictions(trained.network, trained.params, trained.statistics, test.images, device)
    labels, data = np.asarray(test.labels), trained.config.data
    assert trained.encoder is not None
    assert data.field is not None
    shape = *shape_of(np.asarray(test.images)), -1
    ratio = psnr(float(np.square(found - labels).mean()), task.peak)
    is_image = data.field[0] == "image"
    return FieldPredictions(trained.encoder.features, labels.reshape(shape), found.reshape(shape), ratio, is_image)


def first_filters(trained: TrainedModel) -> np.ndarray | None:
    """The weights of the first layer that has any, as pictures (outputs, C, H, W); None if its inputs are not pictures.

    The layer is a convolution of larger windows than 1x1, or a linear layer of all pixels.
    """
    weights = next((x.numpy() for x in tree.leaves(trained.params) if len(x.shape) > 1), None)
    channels, height, width = trained.image_shape
    if weights is None or (height, width) == (1, 1):
        return None
    if weights.ndim == 2 and weights.shape[1] == channels * height * width:
        return weights.reshape(-1, channels, height, width)
    return weights if weights.ndim == 4 and weights.shape[2:] != (1, 1) else None
