"""Splits and the order of batches; both depend on the seed only."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from adtrain.data.errors import DataError
from adtrain.data.shuffle import permutation
from adtrain.data.split import Split

SPLIT_STREAM, TEST_STREAM = 0, 2
"""The random streams of the two splits, beside SHUFFLE_STREAM."""


def split_validation(split: Split, fraction: float, seed: int, last: int = 0) -> tuple[Split, Split | None]:
    """Split into (train, validation), stratified by class if there are classes; validation is None if `fraction` is 0.

    If `last` is not 0, validation has that number of last examples instead, whatever the seed.
    Validation has `validation_size` examples. The number of each class is rounded by the largest-remainder method. Both
    parts keep the order of `split`. The end of a text is its validation part.
    Raises DataError as `validation_size` does.
    """
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
        return Split(split.images[:end], split.labels[:end]), Split(split.images[end:], split.labels[end:])
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(stream,)))
    chosen = np.zeros(len(split), bool)
    classes = split.labels if split.labels.ndim == 1 else np.zeros(len(split), np.int64)
    for label, count in enumerate(_apportioned(np.bincount(classes), fraction, total)):
        chosen[rng.permutation(np.flatnonzero(classes == label))[:count]] = True
    return split.take(np.flatnonzero(~chosen)), split.take(np.flatnonzero(chosen))


def batches(count: int, batch_size: int, seed: int, epoch: int) -> Iterator[np.ndarray]:
    """The epoch's batches of int64 indices, together a permutation of `count`; the last batch may be smaller."""
    if batch_size < 1:
        raise DataError(f"batch size: found {batch_size}, expected at least 1")
    order = permutation(count, seed, epoch)
    return (order[start : start + batch_size] for start in range(0, count, batch_size))


def _apportioned(counts: np.ndarray, fraction: float, total: int) -> np.ndarray:
    """counts * fraction, rounded to integers that sum to `total`: the largest remainders are rounded up."""
    exact = counts * fraction
    shares = np.floor(exact).astype(np.int64)
    largest_remainders = np.argsort(shares - exact, kind="stable")
    shares[largest_remainders[: total - shares.sum()]] += 1
    return shares
