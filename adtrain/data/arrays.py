"""Data sets of arrays in memory, as a program has them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from adtrain.data.errors import DataError
from adtrain.data.options import Options
from adtrain.data.part import Part, Parts, as_images, as_labels, numbered

TARGET = "y_train"
"""The name of the numbers to predict: that in the NPZ file that `train` writes, from which a run is continued."""


def read(data: Any, test_data: Any, options: Options, names: tuple[str, str] = ("data", "test_data")) -> Parts:
    """The training part in the pair `data` of images and labels, and the test part in `test_data`, unless it is None.

    Images and labels are arrays, or what NumPy converts into arrays, of the shapes and types that NPZ files can have;
    `part.as_images` lists them. Arrays of the right type are not copied.
    Raises DataError that names the argument as `names` say, and DataOptionError.
    """
    train = _part(data, names[0], options)
    return Parts(train, None if test_data is None else _part(test_data, names[1], options))


def as_numpy(given: Any, place: str) -> np.ndarray:
    """What NumPy makes of `given`. Raises DataError where it is not rectangular, or its elements are objects."""
    try:
        found = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{place}: found no array of numbers ({' '.join(str(error).split())})") from None
    if found.dtype == object:
        types = {type(x) for x in found.ravel()}
        if len(types) == 1 and types <= {str, bool}:  # as pandas has them
            return found.astype(types.pop())
        raise DataError(f"{place}: found elements of type object, expected numbers, or strings as labels")
    return found


def _part(given: Any, name: str, options: Options) -> Part:
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        count = f" of {len(given)}" if isinstance(given, (tuple, list)) else ""
        hint = "; the config names files, by data.path" if isinstance(given, (str, os.PathLike)) else ""
        expected = f"expected a pair of arrays (images, labels){hint}"
        raise DataError(f"{name}: found a {type(given).__name__}{count}, {expected}")
    places = f"{name}: images", f"{name}: labels"
    images, labels = map(as_numpy, given, places)
    found = as_images(images, places[0], options)
    checked = as_labels(labels, len(found), places[1])
    return Part(found, checked, places[1], targets=numbered(TARGET, checked))
