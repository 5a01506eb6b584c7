"""A trained model, applied to arrays, rows and files; and checks of arguments that have a wrong type."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from adtrain import nn
from adtrain.core.errors import AdtrainError
from adtrain.data import DataOptionError, Images, table_encoder
from adtrain.data.datasets import class_values
from adtrain.data.part import ShapeOptions, as_images, as_numpy
from adtrain.data.statistics import PIXEL_MAX
from adtrain.text import counted
from adtrain.training import Arrays, Score, TrainedModel, inputs
from adtrain.training.evaluation import predictions


class Predictions(NamedTuple):
    """The predictions of classes for N images, or at each position of N sequences, with a second axis `length`.

    Attributes:
        classes: int64 (N,), the number of the most probable class.
        labels: (N,), its label in the training data, in the type that it has there: integers, booleans, floats such as
            2.0 in a table, or strings. An output without a class has its number.
        probabilities: (N, outputs) of the network's dtype; the column is the number of the class.
    """

    classes: np.ndarray
    labels: np.ndarray
    probabilities: np.ndarray


class Model:
    """A trained network on a device.

    Attributes:
        config: the resolved config.
        classes: the names of the classes: the labels in the training data as strings, in the order of their values.
        targets: the names of the numbers, or of the labels of 0 and 1; then there are no classes.
        image_shape: (C, H, W); rows of a table are (F, 1, 1).
        params, state: the trees of parameters and of running statistics.
    """

    def __init__(self, trained: TrainedModel, device: str) -> None:
        self._trained, self.device = trained, device
        self.config, self.classes, self.targets = trained.config, trained.classes, trained.targets
        self.image_shape, self.params, self.state = trained.image_shape, trained.params, trained.statistics

    def predict(self, images: Any) -> Predictions:
        """The classes and probabilities of images, or of rows of a table.

        Args:
            images: an array, or what NumPy converts into one: (N, C, H, W), (N, H, W, C), (N, H, W), or flat rows
                (N, C * H * W). Numbers are as in training: pixels from 0 to 255, or floats, not normalised. Or the path
                of a file, see `inputs.read`. After a training on a table also rows with its columns, by their names: a
                dict of lists, a list of dicts, or a DataFrame. Rows with empty cells are left out where
                `data.missing: drop` says so.

        Raises:
            AdtrainError: another shape or type, numbers that are not finite, a missing column or a wrong cell; or the
                model has no classes.
        """
        if self.targets:
            raise AdtrainError("predict: the model was trained on numbers, not on classes; call predict_values")
        rows = self._predicted(images)
        classes = rows.argmax(axis=-1)
        labels = class_values(self.classes, self._trained.class_type, rows.shape[-1])
        return Predictions(classes, labels[classes], rows)

    def predict_values(self, images: Any) -> np.ndarray:
        """The predicted numbers (N, targets) in the units of the training data, or the probabilities that labels are 1.

        Takes what `predict` takes. Raises AdtrainError as it does, and where the model has no targets.
        """
        if not self.targets:
            raise AdtrainError("predict_values: the model was trained on classes, not on numbers; call predict")
        return self._predicted(images)

    def evaluate(self, data: Any = None) -> Score:
        """The loss and the metrics on examples: a named tuple, such as (loss, accuracy).

        Args:
            data: a pair of images and labels, or a table with the columns of the training, as `adtrain.train` takes
                them; or the path of a file or folder. By default the test part of the config's data.

        Raises:
            AdtrainError: the examples have another shape or type, or labels that the training did not have.
        """
        trained = self._trained
        if data is None or isinstance(data, (str, os.PathLike)):
            split = trained.test_split(None if data is None else as_path(data, "evaluate"))
        else:
            split = trained.test_split(arrays=Arrays(data))
        return trained.evaluation(split, self.device, "data").score(trained.params, trained.statistics)

    def _predicted(self, images: Any) -> np.ndarray:
        trained = self._trained
        if isinstance(images, (str, os.PathLike)):
            found: Images = inputs.read(as_path(images, "predict"), trained).images
        elif table_encoder.is_rows(images):
            found = inputs.of_rows(images, trained).images
        else:
            found = self._checked(images)
        return predictions(trained.network, trained.params, trained.statistics, found, self.device)

    def _checked(self, images: Any) -> Images:
        given = as_numpy(images, "predict")
        shape, of_pixels = self.image_shape, self._trained.network.scale == PIXEL_MAX
        expected = f"N images of shape {shape} or rows of {int(np.prod(shape))} numbers, as in training"
        if given.ndim and not len(given):
            raise AdtrainError(f"predict: found no images (shape {given.shape}), expected {expected}")
        try:
            found = as_images(given, "predict", ShapeOptions(shape))
        except DataOptionError:
            raise AdtrainError(f"predict: found images of shape {given.shape}, expected {expected}") from None
        if of_pixels and found.dtype != np.uint8:
            raise AdtrainError(
                f"predict: found {given.dtype} numbers, expected integers from 0 to 255, as the model was trained on"
            )
        return inputs.stored(np.asarray(found), "predict", self._trained)

    def __repr__(self) -> str:
        count = nn.count_parameters(self.params)
        outputs = counted(len(self.targets), "targets") if self.targets else counted(len(self.classes), "classes")
        return f"Model({self.config.name}: {outputs}, {counted(count, 'parameters')}, on {self.device})"


def check_type(given: Any, kinds: type | tuple[type, ...], what: str, expected: str) -> None:
    """Raise AdtrainError unless `given` is one of `kinds`; `what` is the argument, `expected` says what it can be."""
    if not isinstance(given, kinds):
        raise AdtrainError(f"{what}: found an object of type {type(given).__name__}, expected {expected}")


def as_path(given: Any, what: str) -> Path:
    """The path in an argument. Raises AdtrainError for another type, and for the empty path, which would be "."."""
    check_type(given, (str, os.PathLike), what, "a path")
    if not os.fspath(given):
        raise AdtrainError(f"{what}: found an empty path")
    return Path(given)
