"""What readers return: parts with images and labels, and formats of files; checks of arrays, and arrays in memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np

from adtrain.core.array import no_array, type_with_article
from adtrain.core.options import Expected
from adtrain.data.errors import DataError, DataOptionError
from adtrain.data.file_array import Conversion, FileArray
from adtrain.data.split import Labels, Stored, chunks
from adtrain.data.statistics import PIXEL_MAX, converted, holding
from adtrain.data.tokenizer import Tokenizer
from adtrain.option_types import Size
from adtrain.text import counted

# The largest compression ratio of deflate.
MAX_DEFLATE_RATIO = 1032

TARGET = "y_train"
"""The name of the numbers to predict: that in the NPZ file that `train` writes, from which a run is continued."""


@dataclass(frozen=True)
class Column:
    """A column with features.

    Attributes:
        name: None if the table has no header.
        position: its index in the file, from 0.
        categories: the texts of a column of categories; None for a column of numbers or dates.
        is_date: whether its cells are dates, as days since `notation.EPOCH`.
        sign: what all numbers have before or after their digits, such as $ or %, and what is left out.
    """

    name: str | None
    position: int
    categories: tuple[str, ...] | None = None
    is_date: bool = False
    sign: str = ""

    @property
    def title(self) -> str:
        """The name, or the position if there is no name."""
        return str(self.position) if self.name is None else self.name


@dataclass(frozen=True)
class Columns:
    """The columns with features, in their order, and `width`, the number of all columns of the file.

    `target_signs` are those of the numbers to predict, one for each column of targets, see `Column.sign`.
    """

    features: tuple[Column, ...]
    width: int
    target_signs: tuple[str, ...] = ()

    @classmethod
    def named(cls, names: Iterable[str]) -> Columns:
        """Columns of numbers with these names, one after the other."""
        features = tuple(Column(name, i) for i, name in enumerate(names))
        return cls(features, len(features))


@dataclass(frozen=True)
class Part:
    """Examples as a reader returns them.

    `images` are uint8 pixels, or numbers in float32 or float64, (N, C, H, W). `labels` (N,) are integers or strings of
    any value, or the numbers to predict, float64 (N, targets). `place` is the file or folder, for messages. With
    `columns`, the file is a table and the images are its cells, see `csv_table`. `targets` are the names of the labels'
    columns, if the file has some.
    """

    images: Stored
    labels: Labels
    place: str
    columns: Columns | None = None
    targets: tuple[str, ...] = ()


class Parts(NamedTuple):
    """The parts of a file or folder, messages about skipped images, and the names of the classes, if it has them.

    The last `validation_rows` examples of `train` are those that the folder has for validation. `tokenizer` is that of
    a text of tokens.
    """

    train: Part
    test: Part | None = None
    skipped: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    validation_rows: int = 0
    tokenizer: Tokenizer | None = None


class Cells(NamedTuple):
    """The cells of a table's columns with features as float64 (N, columns): numbers, days, codes of categories, NaN.

    `rows` are the indices of the N rows among all rows of the file.
    """

    values: np.ndarray
    columns: tuple[Column, ...]
    rows: np.ndarray


class Known(NamedTuple):
    """What the training part determines: the columns of a table, and of a text the names of the classes, () if unknown,
    and the tokenizer."""

    columns: Columns | None = None
    classes: tuple[str, ...] = ()
    tokenizer: Tokenizer | None = None


NOTHING = Known()


@dataclass(frozen=True)
class ShapeOptions:
    """The option of arrays.

    Attributes:
        shape: [channels, height, width] of images in flat rows; it also tells (N, C, H, W) from (N, H, W, C)
    """

    shape: Annotated[tuple[Size, Size, Size], Expected("a list of channels, height and width")] | None = None


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of data.

    Attributes:
        name: in the descriptions of options; in lower case a value of `data.format`, if the format is one of files.
        title: in messages.
        suffixes: of the names of its files, in lower case; empty for a format of folders.
        content: what its folders have, in messages.
        is_content: whether a folder has it.
        options: a dataclass whose fields are options of the config's data section; its docstring says what they mean.
        examples: what the data consist of, in reports.
        read: reads a file or folder. The second argument has the fields of `options`.
        read_rows: reads the examples of a file without their labels, to predict them; None if files have no such.
    """

    name: str
    title: str
    suffixes: tuple[str, ...] = ()
    content: str = ""
    is_content: Callable[[Path], bool] = lambda folder: False
    options: type | None = None
    examples: str
    read: Callable[[Path, Any, Known], Parts]
    read_rows: Callable[[Path, Any, Known], Cells | np.ndarray] | None = None

    @property
    def own_options(self) -> frozenset[str]:
        """The names of the fields of `options`."""
        return frozenset(() if self.options is None else (field.name for field in fields(self.options)))

    @property
    def takes(self) -> frozenset[str]:
        """The names of its options, beside those of every format."""
        return self.own_options | ({"format"} if self.suffixes else frozenset())


def as_images(array: np.ndarray | FileArray, place: str, options: ShapeOptions) -> Stored:
    """An array of numbers as images (N, C, H, W): uint8, float32 or float64; not copied if the dtype is right.

    (N, F) becomes (N, *options.shape), or (N, F, 1, 1) without that option. (N, H, W) becomes (N, 1, H, W). Four axes
    are (N, C, H, W) or (N, H, W, C) as `options.shape` says; without that option they are (N, H, W, C) if the last
    axis has 1 or 3 elements and the second has neither. Images of integers in [0, 255] become uint8. All other numbers,
    and those of flat rows without that option, become float32, or float64 if their type has numbers that float32 lacks.
    Raises DataError for any other array, and DataOptionError if it does not fit `options.shape`.
    """
    if array.dtype.kind not in "buif":
        raise DataError(f"{place}: found elements of type {array.dtype}, expected integers or floats")
    if not 2 <= array.ndim <= 4:
        raise DataError(
            f"{place}: found the shape {array.shape}, expected (N, F), (N, H, W), (N, H, W, C) or (N, C, H, W)"
        )
    if array.size == 0:
        raise DataError(f"{place}: found no pixels (shape {array.shape}), expected at least one image")
    images = _shaped(array, place, options.shape)
    pixels = (array.ndim > 2 or options.shape is not None) and _are_pixels(images)
    return converted(images, Conversion(np.dtype(np.uint8) if pixels else holding(images.dtype)), place)


def as_labels(array: np.ndarray | FileArray, count: int, place: str) -> np.ndarray:
    """Labels (N,) or (N, 1), integers, booleans or strings, as (N,).

    Floats, and several columns, become float64 (N, targets), bytes the strings that they are in UTF-8. Raises DataError
    unless there is a label for each image, and each number is finite in float32.
    """
    labels = np.asarray(array)
    columns = labels.ndim == 2 and labels.shape[1] > 1
    if (labels.dtype.kind == "f" and labels.ndim in (1, 2)) or (labels.dtype.kind in "bui" and columns):
        return _as_numbers(labels, count, place)
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.ndim != 1 or labels.dtype.kind not in "buiUS":
        found = f"{array.dtype} of shape {array.shape}"
        raise DataError(f"{place}: found {found}, expected an integer, a string or numbers for each image")
    if len(labels) != count:
        raise DataError(f"{place}: found {counted(len(labels), 'labels')}, expected {count}, one for each image")
    if labels.dtype == np.uint64 and count and labels.max() > np.iinfo(np.int64).max:
        raise DataError(f"{place}: found label {labels.max()}, expected one below 2^63")
    if labels.dtype.kind == "b":
        return labels
    if labels.dtype.kind in "ui":
        return labels.astype(np.int64)
    if labels.dtype.kind == "S":
        try:
            labels = np.char.decode(labels, "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{place}: found bytes as labels ({error}), expected text in UTF-8") from None
    texts = np.ascontiguousarray(labels, labels.dtype.newbyteorder("="))
    codes = texts.view(np.uint32).reshape(count, -1) if texts.nbytes else np.zeros((count, 1), np.uint32)
    wrong = (codes > sys.maxunicode) | ((codes >= 0xD800) & (codes < 0xE000))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise DataError(f"{place}: found the code 0x{codes[row, column]:x} in label {row}, expected Unicode text")
    return texts


def _as_numbers(array: np.ndarray, count: int, place: str) -> np.ndarray:
    numbers = array.reshape(len(array), -1).astype(np.float64)
    if len(numbers) != count:
        raise DataError(f"{place}: found {counted(len(numbers), 'targets')}, expected {count}, one for each image")
    with np.errstate(over="ignore"):
        wrong = ~np.isfinite(numbers.astype(np.float32))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise DataError(f"{place}: found {numbers[row, column]} in row {row}, expected a finite number")
    return numbers


def numbered(name: str, labels: np.ndarray) -> tuple[str, ...]:
    """A name for each column of labels: y, or y[0], y[1], ..."""
    count = 1 if labels.ndim == 1 else labels.shape[1]
    return (name,) if count == 1 else tuple(f"{name}[{i}]" for i in range(count))


def _shaped(array: np.ndarray | FileArray, place: str, shape: tuple[int, int, int] | None) -> np.ndarray | FileArray:
    count, *sizes = array.shape
    images = array.reshape(count, *(1,) * (array.ndim == 3), *sizes, *(1,) * (2 * (array.ndim == 2)))
    if shape is None:
        if array.ndim == 4 and sizes[0] not in (1, 3) and sizes[2] in (1, 3):
            return array.transpose(0, 3, 1, 2)
        return images
    channels, height, width = shape
    if array.ndim == 2 and sizes[0] == channels * height * width:
        return array.reshape(count, *shape)
    if images.shape[1:] == shape:
        return images
    if array.ndim == 4 and tuple(sizes) == (height, width, channels):
        return array.transpose(0, 3, 1, 2)
    raise DataOptionError("shape", f"found {list(shape)}, but {place} has images of shape {sizes}")


def _are_pixels(images: np.ndarray | FileArray) -> bool:
    """Whether all elements are integers from 0 to 255."""
    if images.dtype.kind not in "ui" or images.dtype == np.uint8:
        return images.dtype.kind in "bu"
    return all(chunk.min() >= 0 and chunk.max() <= PIXEL_MAX for chunk in chunks(images))


def arrays_as_parts(
    data: Any, test_data: Any, options: ShapeOptions, names: tuple[str, str] = ("data", "test_data")
) -> Parts:
    """The training part in the pair `data` of images and labels, and the test part in `test_data`, unless it is None.

    Images and labels are arrays, or what NumPy converts into arrays, of the shapes and types that NPZ files can have;
    `as_images` lists them. Arrays of the right type are not copied.
    Raises DataError that names the argument as `names` say, and DataOptionError.
    """
    train = _part(data, names[0], options)
    return Parts(train, None if test_data is None else _part(test_data, names[1], options))


def as_numpy(given: Any, place: str) -> np.ndarray:
    """What NumPy makes of `given`. Raises DataError where it is not rectangular, or its elements are objects."""
    try:
        found = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{place}: found no array of numbers ({no_array(error)})") from None
    if found.dtype == object:
        types = {type(x) for x in found.ravel()}
        if len(types) == 1 and types <= {str, bool}:  # as pandas has them
            return found.astype(types.pop())
        raise DataError(f"{place}: found elements of type object, expected numbers, or strings as labels")
    return found


def _part(given: Any, name: str, options: ShapeOptions) -> Part:
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        count = f" of {len(given)}" if isinstance(given, (tuple, list)) else ""
        hint = "; the config names files, by data.path" if isinstance(given, (str, os.PathLike)) else ""
        expected = f"expected a pair of arrays (images, labels){hint}"
        raise DataError(f"{name}: found {type_with_article(given)}{count}, {expected}")
    places = f"{name}: images", f"{name}: labels"
    images, labels = map(as_numpy, given, places)
    found = as_images(images, places[0], options)
    checked = as_labels(labels, len(found), places[1])
    return Part(found, checked, places[1], targets=numbered(TARGET, checked))
