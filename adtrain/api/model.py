"""A trained model, applied to arrays, rows and files; and files of trees of arrays.

A file has the format safetensors: names, types and numbers, no code. Also checks of arguments that have a wrong type.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from adtrain import nn
from adtrain.config.problems import shortened
from adtrain.core import tree
from adtrain.core.array import Array, array, type_with_article
from adtrain.core.backend import usable_device
from adtrain.core.errors import AdtrainError, with_article
from adtrain.core.tree import TreeDef
from adtrain.data import DataOptionError, Images, table_encoder
from adtrain.data.datasets import class_values
from adtrain.data.part import ShapeOptions, as_images, as_numpy
from adtrain.data.statistics import PIXEL_MAX
from adtrain.files import write_atomic
from adtrain.text import counted
from adtrain.training import Arrays, Score, TrainedModel, inputs, model_file, tensor_file
from adtrain.training.checkpoint import Kind
from adtrain.training.evaluation import predictions
from adtrain.training.tensor_file import TensorFile


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


KIND = "tree"
ROOT = "array"
"""The name of the array of a tree that is one array."""

CONTAINERS: dict[str, Any] = {"dict": dict, "list": list, "tuple": tuple, "NoneType": type(None)}
"""The classes that `load` builds by itself."""


@dataclass(frozen=True)
class TreeMetadata:
    """The structure of a stored tree.

    A leaf is the name of its array. Everything else is a class's name and a list of (key, structure) pairs; None has no
    pairs.
    """

    kind: str
    structure: Any


def save(path: str | os.PathLike[str], arrays: Any) -> None:
    """Write a tree of arrays into a file, in the format safetensors. The same tree gives the same bytes.

    The file holds the old or the new content at any time, never a part.

    Raises:
        AdtrainError: a leaf is not an array, or two leaves have the same name, or the file cannot be written.
    """
    target, tensors = as_path(path, "save: path"), {}
    for name, leaf in _named(arrays, "save").items():
        x = leaf.numpy() if isinstance(leaf, Array) else np.asarray(leaf)
        if x.dtype.name not in tensor_file.NAMES:
            raise AdtrainError(f"save: {name}: found {x.dtype}, expected one of {', '.join(tensor_file.NAMES)}")
        tensors[name] = x.astype(x.dtype.newbyteorder("="), copy=False)
    about = TreeMetadata(KIND, _structure(tree.flatten(arrays)[1], iter(tensors)))
    write_atomic(target, tensor_file.encode(tensors, about))


def load(path: str | os.PathLike[str], *, like: Any = None, device: str = "cpu") -> Any:
    """Read what was trained or saved: the `Model` in a run's folder, or the tree in a file that `save` wrote.

    Args:
        path: the folder or the file.
        like: of a file, a tree of arrays with the same names, shapes and dtypes. It is needed for trees with named
            tuples, dataclasses or registered classes in them; dicts, lists, tuples and None need none.
        device: where the arrays are put: "cpu", "gpu", or "auto".

    Raises:
        AdtrainError: there is no such run or file, or it is damaged or of another format, such as a pickle.
    """
    source, device = as_path(path, "load: path"), usable_device(device)
    if source.is_dir():
        if like is not None:
            raise AdtrainError(f"{source}: found the folder of a run, expected a file of adtrain.save to read by like=")
        return Model(model_file.load(source, device), device)
    if not source.exists():
        raise AdtrainError(f"{source}: found nothing, expected the folder of a run, or a file that adtrain.save wrote")
    file = TensorFile(source)
    if file.metadata(Kind).kind != KIND:
        raise AdtrainError(f"{source}: is a file of a run, expected one of adtrain.save; a run is loaded by its folder")
    if like is not None:
        numbers = file.read(_named(like, "load: like"), "the tree in like=", finite=False)
        return tree.unflatten(tree.flatten(like)[1], [array(x, device=device) for x in numbers.values()])
    numbers = file.arrays(list(file.types()), finite=False)
    structure = file.metadata(TreeMetadata).structure
    return _tree(structure, {name: array(x, device=device) for name, x in numbers.items()}, source)


def _named(arrays: Any, what: str) -> dict[str, Any]:
    """The leaves of a tree by their names. Raises AdtrainError where one is not an array, or two have the same name."""
    found: dict[str, Any] = {}
    for path, leaf in zip(tree.paths(arrays), tree.leaves(arrays), strict=True):
        name = path or ROOT
        if not isinstance(leaf, (Array, np.ndarray, np.generic)):
            raise AdtrainError(f"{what}: {name}: found {type_with_article(leaf)}, expected an array: ad.array(x)")
        if name in found or name == "__metadata__":
            raise AdtrainError(f"{what}: {name}: found two arrays of this name, or a reserved one; rename a key")
        found[name] = leaf
    return found


def _structure(treedef: TreeDef, names: Iterator[str]) -> Any:
    if treedef.kind is None:
        return next(names)
    keys = treedef.keys or range(len(treedef.children))
    for key in keys:
        if type(key) not in (str, int):
            raise AdtrainError(f"save: found the key {key!r}, expected strings and integers as keys")
    pairs = [[key, _structure(child, names)] for key, child in zip(keys, treedef.children, strict=True)]
    return [treedef.kind.__name__ if treedef.kind in CONTAINERS.values() else f"{treedef.kind.__name__}()", pairs]


def _tree(structure: Any, arrays: Mapping[str, Array], path: Path) -> Any:
    """The tree of a structure, which comes from a file and can be anything. Raises AdtrainError."""
    match structure:
        case str() if structure in arrays:
            return arrays[structure]
        case ["NoneType", []]:
            return None
        case ["dict" | "list" | "tuple" as kind, [*pairs]] if all(_is_pair(pair) for pair in pairs):
            children = {key: _tree(child, arrays, path) for key, child in pairs}
            return children if kind == "dict" else CONTAINERS[kind](children.values())
        case [str() as kind, [*_]] if kind.endswith("()"):
            found = f"{path}: found {with_article(shortened(kind.removesuffix('()')))}, which only its class can build"
            raise AdtrainError(f"{found}; give a tree of the same structure: adtrain.load(path, like=tree)")
    raise AdtrainError(f"{path}: is damaged: its structure does not fit its arrays")


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], (str, int))
