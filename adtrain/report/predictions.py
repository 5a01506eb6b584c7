"""The predictions of a trained model for the test images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from adtrain.data import Images
from adtrain.metrics import confusion_matrix
from adtrain.report.numbers import LabelPredictions, NumberPredictions
from adtrain.training import model_file
from adtrain.training.evaluation import class_names, predictions
from adtrain.training.tasks import Multilabel, Regression
from adtrain.training.trust import NONE, Trust


class Mistake(NamedTuple):
    """A misclassified test image: its index, both classes, and the probability of the predicted one."""

    image: int
    label: int
    prediction: int
    probability: float


@dataclass(frozen=True)
class Predictions:
    """The most probable class of each image.

    Attributes:
        images: (N, C, H, W), uint8 or float32.
        labels: int64 (N,).
        classes: a name for each class of the labels and predictions.
        predicted: int64 (N,), the most probable class.
        probability: (N,), the probability of the predicted class.
    """

    images: Images
    labels: np.ndarray
    classes: tuple[str, ...]
    predicted: np.ndarray
    probability: np.ndarray

    @cached_property
    def confusion(self) -> np.ndarray:
        """The number of images by label (row) and predicted class (column): int64 (classes, classes)."""
        return confusion_matrix(self.labels, self.predicted, len(self.classes))

    @property
    def correct(self) -> int:
        return int(np.trace(self.confusion))

    @property
    def pictured(self) -> bool:
        """Whether the images can be shown as pictures. Rows of a table are images of one pixel."""
        return self.images.shape[2:] != (1, 1)

    def worst(self, count: int) -> Sequence[Mistake]:
        """At most `count` mistakes, the highest probability first."""
        wrong = np.flatnonzero(self.predicted != self.labels)
        order = wrong[np.argsort(-self.probability[wrong], kind="stable")][:count]
        return [Mistake(int(i), int(self.labels[i]), int(self.predicted[i]), float(self.probability[i])) for i in order]


AnyPredictions: TypeAlias = Predictions | NumberPredictions | LabelPredictions


def predict(run: Path, device: str, trust: Trust = NONE) -> AnyPredictions:
    """The predictions of the run's model for the test images of its config.

    Raises AdtrainError where the model or the data are missing, damaged, or do not fit together.
    """
    trained = model_file.load(run, device, trust)
    test = trained.test_split()
    rows = predictions(trained.network, trained.params, trained.statistics, test.images, device)
    if isinstance(trained.network.task, Regression):
        return NumberPredictions(trained.targets, test.labels, rows)
    if isinstance(trained.network.task, Multilabel):
        return LabelPredictions(trained.targets, test.labels, (rows > 0.5).astype(np.int64))
    predicted = rows.argmax(axis=1)
    classes = class_names(trained.classes, rows)
    return Predictions(test.images, test.labels, classes, predicted, rows.max(axis=1))
