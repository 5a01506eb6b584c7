"""Which examples are trained on, and in which order; a function of the seed alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from adtrain.data.errors import DataError
from adtrain.data.split import Split

# Each use of the seed has a stream of its own, so that changing one leaves the others' numbers as they were.
SPLIT_STREAM, SHUFFLE_STREAM, TEST_STREAM = 0, 1, 2


def split_validation(split: Split, fraction: float, seed: int) -> tuple[Split, Split | None]:
    """(train, validation) with `fraction` of the examples in validation, each class in its share; None when it is 0.

    Both keep the order of `split`. The sizes add up to `validation_size` by the largest-remainder method. Raises
    DataError as that does.
    """
    total = validation_size(len(split), fraction)
    return _parted(split, fraction, total, seed, SPLIT_STREAM) if total else (split, None)


def split_test(split: Split, fraction: float) -> tuple[Split, Split]:
    """(train, test), as `split_validation` does it, but the same whatever the seed: scores of runs can be compared."""
    return _parted(split, fraction, _size(len(split), fraction, "test"), 0, TEST_STREAM)


def validation_size(count: int, fraction: float) -> int:
    """How many of `count` examples are for validation: round(fraction * count).

    Raises DataError when `fraction` is not in [0, 1), or is not 0 and leaves either side empty.
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


def _parted(split: Split, fraction: float, total: int, seed: int, stream: int) -> tuple[Split, Split]:
    """The split without `total` of its examples, and those, drawn from the stream of the seed."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(stream,)))
    chosen = np.zeros(len(split), bool)
    for label, count in enumerate(_shares(np.bincount(split.labels), fraction, total)):
        chosen[rng.permutation(np.flatnonzero(split.labels == label))[:count]] = True
    return split.take(np.flatnonzero(~chosen)), split.take(np.flatnonzero(chosen))


def batches(count: int, batch_size: int, seed: int, epoch: int) -> Iterator[np.ndarray]:
    """The epoch's batches of int64 indices into `count` examples: together a permutation; the last may be short."""
    if batch_size < 1:
        raise DataError(f"batch size: found {batch_size}, expected at least 1")
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(SHUFFLE_STREAM, epoch)))
    order = rng.permutation(count)
    return (order[start : start + batch_size] for start in range(0, count, batch_size))


def _shares(counts: np.ndarray, fraction: float, total: int) -> np.ndarray:
    exact = counts * fraction
    shares = np.floor(exact).astype(np.int64)
    largest_remainders = np.argsort(shares - exact, kind="stable")
    shares[largest_remainders[: total - shares.sum()]] += 1
    return shares
