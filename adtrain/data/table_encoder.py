"""The features of a table's rows: numbers, encoded categories, and values for empty cells, as in the training rows."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from math import isfinite, prod

import numpy as np

from adtrain.data.columns import Column, Columns, printable, quoted
from adtrain.data.errors import DataError
from adtrain.data.memory import require_memory
from adtrain.data.options import Encoding, Options
from adtrain.data.part import as_images
from adtrain.text import counted, visible

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TableEncoder:
    """Makes features of the cells that `csv_table` reads.

    A column of numbers is one feature. With `encoding` "one_hot" a column of categories is one feature for each
    category, 1 in the rows with that category and 0 in others. With "index" it is one feature, the category's number
    from 1. Rows with a category that the training rows do not have are 0 in all features of the column.

    Attributes:
        columns: with the categories of the training rows, in sorted order.
        fill: the features of empty cells, one number for each feature; empty if the training rows have no empty cells.
    """

    columns: Columns
    fill: tuple[float, ...]
    encoding: Encoding = "one_hot"

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features, such as `width` or `city=Berlin`."""
        return tuple(name for column in self.columns.features for name in self._names(column))

    @property
    def indexed(self) -> tuple[bool, ...]:
        """For each feature, whether it is the number of a category."""
        if self.encoding == "one_hot":
            return (False,) * len(self.features)
        return tuple(column.categories is not None for column in self.columns.features)

    def _names(self, column: Column) -> tuple[str, ...]:
        if column.categories is None or self.encoding == "index":
            return (column.title,)
        return tuple(f"{column.title}={text}" for text in column.categories)

    def fits(self, options: Options, image_shape: tuple[int, ...]) -> bool:
        """Whether the encoder makes images of this shape, and fills empty cells exactly if the options say so."""
        width, columns = len(self.features), self.columns.features
        fill = width if options.missing in ("mean", "zero") else 0
        return (
            width == prod(image_shape)
            and (options.shape or (width, 1, 1)) == image_shape
            and len(self.fill) == fill
            and self.encoding == options.category_encoding
            and all(map(isfinite, self.fill))
            and all(0 <= column.position < self.columns.width for column in columns)
            and len({column.name is None for column in columns}) == 1
        )

    def encode(self, cells: np.ndarray, columns: tuple[Column, ...], place: str) -> np.ndarray:
        """The features (N, features) of cells (N, columns) in the cells' type, with codes of categories of `columns`.

        Warns about categories that the training rows do not have, with one line for each column. `place` is the file.
        """
        if all(column.categories is None for column in columns) and not np.isnan(cells).any():
            return cells
        nbytes = cells.itemsize * len(cells) * len(self.features)
        require_memory(place, nbytes, "; data.drop leaves out columns with many categories")
        features, begin = np.zeros((len(cells), len(self.features)), cells.dtype), 0
        for i, (column, found) in enumerate(zip(self.columns.features, columns, strict=True)):
            block, values = features[:, begin : begin + len(self._names(column))], cells[:, i]
            filled = np.flatnonzero(~np.isnan(values))
            if column.categories is None:
                block[filled, 0] = values[filled]
            else:
                numbers = _numbers(values[filled].astype(np.int64), column, found, place)
                if self.encoding == "index":
                    block[filled, 0] = numbers
                else:
                    known = numbers > 0
                    block[filled[known], numbers[known] - 1] = 1
            if self.fill:
                block[np.isnan(values)] = self.fill[begin : begin + block.shape[1]]
            begin += block.shape[1]
        return features

    def images(self, cells: np.ndarray, columns: tuple[Column, ...], place: str, options: Options) -> np.ndarray:
        """The features as images: (N, F, 1, 1), or with `options.shape` (N, *shape), uint8 if all are pixels."""
        features = self.encode(cells, columns, place)
        if options.shape and options.missing != "mean":
            features = _as_pixels(features)
        return np.asarray(as_images(features, place, options))


def learn(cells: np.ndarray, rows: np.ndarray, columns: Columns, options: Options, place: str) -> TableEncoder:
    """The encoder for the training rows, those at `rows` of `cells`, float64 (N, columns) with codes of categories.

    With the option `missing: mean` an empty cell gets the mean of each of its features over the training rows that are
    not empty, with `zero` 0; where categories are numbers, it gets 0. Raises DataError for a column without any value.
    """
    learnt, fill, mean = [], list[float](), options.missing == "mean"
    for i, column in enumerate(columns.features):
        values = cells[rows, i]
        values = values[~np.isnan(values)]
        if mean and not len(values):
            reason = "found no value in the training rows, expected one for data.missing: mean; data.drop leaves it out"
            raise DataError(f"{place}: column {printable(column.title)}: {reason}")
        if column.categories is None:
            learnt.append(column)
            fill.append(float(values.mean()) if mean else 0.0)
            continue
        codes, counts = np.unique(values.astype(np.int64), return_counts=True)
        by_text = sorted((column.categories[code], int(count)) for code, count in zip(codes, counts, strict=True))
        learnt.append(replace(column, categories=tuple(text for text, _ in by_text)))
        if options.category_encoding == "index":
            fill.append(0.0)
        else:
            fill += [count / len(values) if mean else 0.0 for _, count in by_text]
    if not fill:
        raise DataError(f"{place}: found no value in the columns of the training rows, expected features")
    filled = tuple(fill) if options.missing in ("mean", "zero") else ()
    return TableEncoder(Columns(tuple(learnt), columns.width), filled, options.category_encoding)


def _numbers(codes: np.ndarray, column: Column, found: Column, place: str) -> np.ndarray:
    """The number of each category from 1, or 0 with a warning for unknown ones.

    `codes` are indices into the categories of `found`.
    """
    known = {text: number for number, text in enumerate(column.categories or (), 1)}
    texts = found.categories or ()
    numbers = np.array([known.get(text, 0) for text in texts], np.int64)[codes]
    if not numbers.all():
        unseen = codes[numbers == 0]
        others = len(np.unique(unseen)) - 1
        what = f"found {quoted(texts[unseen[0]])}{f' and {others:,} more' if others else ''}"
        where = f"in column {printable(column.title)} ({counted(len(unseen), 'rows')})"
        reason = "which no training row has: the column's features are 0"
        _log.warning("adtrain: warning: %s: %s %s, %s", visible(place), what, where, reason)
    return numbers


def _as_pixels(numbers: np.ndarray) -> np.ndarray:
    """The numbers as uint8 if that changes no value."""
    with np.errstate(invalid="ignore"):
        pixels = numbers.astype(np.uint8)
    return pixels if np.array_equal(pixels, numbers) else numbers
