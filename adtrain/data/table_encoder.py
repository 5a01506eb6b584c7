"""The features of a table's rows: numbers, one-hot categories, and values for empty cells, as the training rows had."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from math import isfinite, prod

import numpy as np

from adtrain.data.columns import Column, Columns, printable, quoted
from adtrain.data.errors import DataError
from adtrain.data.memory import require_memory
from adtrain.data.options import Options
from adtrain.data.part import as_images
from adtrain.text import visible

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TableEncoder:
    """Makes features of the cells that `csv_table` reads.

    A column of numbers is one feature. A column of categories is one feature for each category, 1 in the rows with that
    category and 0 in others; rows with a category that the training rows do not have are 0 in all of them.

    Attributes:
        columns: with the categories of the training rows, in sorted order.
        fill: the features of empty cells, one number for each feature; empty if the training rows have no empty cells.
    """

    columns: Columns
    fill: tuple[float, ...]

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features."""
        return tuple(name for column in self.columns.features for name in column.features)

    def fits(self, options: Options, image_shape: tuple[int, ...]) -> bool:
        """Whether the encoder makes images of this shape, and fills empty cells exactly if the options say so."""
        width, columns = len(self.features), self.columns.features
        fill = width if options.missing in ("mean", "zero") else 0
        return (
            width == prod(image_shape)
            and (options.shape or (width, 1, 1)) == image_shape
            and len(self.fill) == fill
            and all(map(isfinite, self.fill))
            and all(0 <= column.position < self.columns.width for column in columns)
            and len({column.name is None for column in columns}) == 1
        )

    def encode(self, cells: np.ndarray, columns: tuple[Column, ...], place: str) -> np.ndarray:
        """The features, float32 (N, features), of cells, float32 (N, columns), with codes of categories of `columns`.

        Warns about categories that the training rows do not have, with one line for each column. `place` is the file.
        """
        if all(column.categories is None for column in columns) and not np.isnan(cells).any():
            return cells
        require_memory(
            place, 4 * len(cells) * len(self.features), "; data.drop leaves out columns with many categories"
        )
        features, begin = np.zeros((len(cells), len(self.features)), np.float32), 0
        for i, (column, found) in enumerate(zip(self.columns.features, columns, strict=True)):
            block, values = features[:, begin : begin + column.width], cells[:, i]
            filled = np.flatnonzero(~np.isnan(values))
            if column.categories is None:
                block[filled, 0] = values[filled]
            else:
                _write_ones(block, filled, values[filled].astype(np.int64), column, found, place)
            if self.fill:
                block[np.isnan(values)] = self.fill[begin : begin + column.width]
            begin += column.width
        return features

    def images(self, cells: np.ndarray, columns: tuple[Column, ...], place: str, options: Options) -> np.ndarray:
        """The features as images: (N, F, 1, 1), or with `options.shape` (N, *shape), uint8 if all are pixels."""
        features = self.encode(cells, columns, place)
        if options.shape and options.missing != "mean":
            features = _as_pixels(features)
        return np.asarray(as_images(features, place, options))


def learn(cells: np.ndarray, rows: np.ndarray, columns: Columns, missing: str, place: str) -> TableEncoder:
    """The encoder for the training rows, those at `rows` of `cells`, float32 (N, columns) with codes of categories.

    `missing` is the option: with `mean` an empty cell gets the mean of each of its features over the training rows that
    are not empty, with `zero` 0. Raises DataError for a column without any value.
    """
    learnt, fill = [], list[float]()
    for i, column in enumerate(columns.features):
        values = cells[rows, i].astype(np.float64)
        values = values[~np.isnan(values)]
        if missing == "mean" and not len(values):
            reason = "found no value in the training rows, expected one for data.missing: mean; data.drop leaves it out"
            raise DataError(f"{place}: column {printable(column.title)}: {reason}")
        if column.categories is None:
            learnt.append(column)
            fill.append(float(values.mean()) if missing == "mean" else 0.0)
            continue
        codes, counts = np.unique(values.astype(np.int64), return_counts=True)
        by_text = sorted((column.categories[code], int(count)) for code, count in zip(codes, counts, strict=True))
        learnt.append(replace(column, categories=tuple(text for text, _ in by_text)))
        fill += [count / len(values) if missing == "mean" else 0.0 for _, count in by_text]
    if not fill:
        raise DataError(f"{place}: found no value in the columns of the training rows, expected features")
    return TableEncoder(Columns(tuple(learnt), columns.width), tuple(fill) if missing in ("mean", "zero") else ())


def _write_ones(
    block: np.ndarray, rows: np.ndarray, codes: np.ndarray, column: Column, found: Column, place: str
) -> None:
    """Write 1 for the category of each of these rows; `codes` are indices into the categories of `found`."""
    numbers = {text: number for number, text in enumerate(column.categories or ())}
    texts = found.categories or ()
    features = np.array([numbers.get(text, -1) for text in texts], np.int64)[codes]
    known = features >= 0
    block[rows[known], features[known]] = 1
    if not known.all():
        unseen = codes[~known]
        others = len(np.unique(unseen)) - 1
        what = f"found {quoted(texts[unseen[0]])}{f' and {others:,} more' if others else ''}"
        where = f"in column {printable(column.title)} ({len(unseen):,} row{'s' if len(unseen) > 1 else ''})"
        reason = "which no training row has: the column's features are 0"
        _log.warning("adtrain: %s: %s %s, %s", visible(place), what, where, reason)


def _as_pixels(numbers: np.ndarray) -> np.ndarray:
    """The numbers as uint8 if that changes no value."""
    with np.errstate(invalid="ignore"):
        pixels = numbers.astype(np.uint8)
    return pixels if np.array_equal(pixels, numbers) else numbers
