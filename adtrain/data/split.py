"""Labelled examples, in memory or in a file: parts of a data set, held-out parts of them, and batches.

Splits and the order of batches depend on the seed only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np

from adtrain.data.errors import DataError
from adtrain.data.file_array import FileArray, Indexed, MemoryStream, Sequences, cut
from adtrain.data.shuffle import permutation

CHUNK_BYTES = 1 << 20

SPLIT_STREAM, TEST_STREAM = 0, 2
"""The random streams of the two splits, beside SHUFFLE_STREAM."""


Stored: TypeAlias = np.ndarray | FileArray | Sequences
Labels: TypeAlias = Any
"""An array, or the `Sequences` of a stream. Type checkers take them for arrays."""


@dataclass(frozen=True, eq=False)
class Rows(Indexed):
    """Rows of an array in a given order, without copying it: indexing gathers the requested rows only."""

    base: Stored
    rows: np.ndarray  # int64 (N,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.base.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:  # type: ignore[override]
        return self.base.dtype

    def rows_at(self, numbers: np.ndarray) -> np.ndarray:
        return self.base[self.rows[numbers]]


Images: TypeAlias = Stored | Rows


def chunks(images: Images) -> Iterator[np.ndarray]:
    """The images in chunks (n, C, H, W) of about CHUNK_BYTES. Labels are divided in the same way."""
    rows = max(1, CHUNK_BYTES * len(images) // max(images.nbytes, 1))
    for start in range(0, len(images), rows):
        yield images[start : start + rows]


def _digest(whole: Images) -> str:
    if isinstance(whole, Sequences):
        return sha256(whole.digest.encode()).hexdigest()
    found = sha256(f"{whole.dtype} {whole.shape}".encode())
    for part in chunks(whole):
        found.update(np.ascontiguousarray(part).data)
    return found.hexdigest()


@dataclass(frozen=True)
class Split:
    """One part of a data set: `images` uint8 or float32 (N, C, H, W), and `labels`.

    Labels are class numbers, int64 (N,), or the numbers to predict, float64 (N, targets).

    Of a text the images are the classes at the positions of sequences, float32 (N, 1, 1, length), and the labels the
    classes that follow them, int32 (N, length).

    The images are an array, in memory or in a file, or `Rows` of one. Tabular data have one channel per
    feature: (N, F, 1, 1).
    """

    images: Images
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def digests(self) -> dict[str, str]:
        """A SHA-256 of the images and one of the labels, by these names: of type, shape, numbers and their order.

        All images are read, also those in a file. That takes less time than their mean and standard deviation. Tokens
        in files are not read: their header has digests.
        """
        return {"images": _digest(self.images), "labels": _digest(self.labels)}

    @property
    def is_text(self) -> bool:
        """Whether the examples are sequences, in the order of a text."""
        return self.labels.ndim == 2 and self.labels.dtype.kind == "i"

    def part(self, begin: int, end: int) -> Split:
        """The sequences of a text from number `begin` to before `end`; nothing is copied."""
        images, labels = (
            x.part(begin, end) if isinstance(x, Sequences) else x[begin:end] for x in (self.images, self.labels)
        )
        return Split(images, labels)

    def at_offsets(self) -> Split:
        """As many sequences of a text, but an index is an offset in the text; see `Sequences`."""
        images, labels = self.images, self.labels
        if not isinstance(images, Sequences) or not isinstance(labels, Sequences):
            firsts = np.asarray(images)[:, 0, 0, :1].astype(np.int32)
            tokens = np.concatenate([firsts, np.asarray(labels)], axis=1).ravel()
            stream = MemoryStream(tokens, " ".join(self.digests.values()))
            images, labels = cut(stream, labels.shape[1])
        return Split(images.at_offsets(), labels.at_offsets())

    def take(self, indices: np.ndarray) -> Split:
        """The examples at these indices, in this order; the images are not copied."""
        images = self.images
        rows = Rows(images.base, images.rows[indices]) if isinstance(images, Rows) else Rows(images, indices)
        return Split(rows, self.labels[indices])


def split_validation(split: Split, fraction: float, seed: int, last: int = 0) -> tuple[Split, Split | None]:
    """Split into (train, validation), stratified by class if there are classes; validation is None if `fraction` is 0.

    If `last` is not 0, validation has that number of last examples instead, whatever the seed.
    Validation has `validation_size` examples. The number of each class is rounded by the largest-remainder method. Both
    parts keep the order of `split`. The end of a text is its validation part.
    Raises DataError as `validation_size` does.
    """
    if last and split.is_text:
        return split.part(0, len(split) - last), split.part(len(split) - last, len(split))
    if last:
        first = np.arange(len(split))
        return split.take(first[:-last]), split.take(first[-last:])
    total = validation_size(len(split), fraction)
    return _divided(split, fraction, total, seed, SPLIT_STREAM) if total else (split, None)


def split_test(split: Split, fraction: float) -> tuple[Split, Split]:
    """(train, test), chosen as by `split_validation`, but without a seed, so that scores of runs are comparable."""
    return _divided(split, fraction, _size(len(split), fraction, "test"), 0, TEST_STREAM)


def validation_size(count: int, fraction: float) -> int:
    """The number of validation examples among `count`: round(fraction * count).

    Raises DataError if `fraction` is not in [0, 1), or if it is above 0 and one of the two parts would be empty.
    """
    return _size(count, fraction, "validation")


def _size(count: int, fraction: float, part: str) -> int:
    if not 0 <= fraction < 1:
        raise DataError(f"{part} fraction: found {fraction}, expected at least 0 and below 1")
    total = round(fraction * count)
    if fraction > 0 and not 0 < total < count:
        raise DataError(
            f"{part} fraction {fraction} of {count} examples: found {total} for {part} and "
            f"{count - total} for training, expected at least 1 of each"
        )
    return total


def _divided(split: Split, fraction: float, total: int, seed: int, stream: int) -> tuple[Split, Split]:
    """(rest, chosen): `total` examples chosen at random, from each class its share.

    Examples with numbers to predict are one class. From a text the last `total` sequences are chosen.
    """
    if split.is_text:
        end = len(split) - total
        return split.part(0, end), split.part(end, len(split))
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(stream,)))
    chosen = np.zeros(len(split), bool)
    classes = split.labels if split.labels.ndim == 1 else np.zeros(len(split), np.int64)
    for label, count in enumerate(_apportioned(np.bincount(classes), fraction, total)):
        chosen[rng.permutation(np.flatnonzero(classes == label))[:count]] = True
    return split.take(np.flatnonzero(~chosen)), split.take(np.flatnonzero(chosen))


def batches(
    count: int, batch_size: int, seed: int, epoch: int, ordered: Callable[[int, int, int], np.ndarray] = permutation
) -> Iterator[np.ndarray]:
    """The epoch's batches of int64 indices, together `ordered(count, seed, epoch)`; the last batch may be smaller.

    By default these are a permutation of `count`.
    """
    if batch_size < 1:
        raise DataError(f"batch size: found {batch_size}, expected at least 1")
    order = ordered(count, seed, epoch)
    return (order[start : start + batch_size] for start in range(0, count, batch_size))


def _apportioned(counts: np.ndarray, fraction: float, total: int) -> np.ndarray:
    """counts * fraction, rounded to integers that sum to `total`: the largest remainders are rounded up."""
    exact = counts * fraction
    shares = np.floor(exact).astype(np.int64)
    largest_remainders = np.argsort(shares - exact, kind="stable")
    shares[largest_remainders[: total - shares.sum()]] += 1
    return shares
