"""The order of an epoch's examples.

Run as a program, it reads lines `count seed epoch` and writes the orders as bytes. It imports only NumPy, so that it
starts fast.
"""

from __future__ import annotations

import sys

import numpy as np

SHUFFLE_STREAM = 1
"""The random stream of orders. Each use of a seed has its own stream, independent of the others."""


def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of `count` examples in an epoch: int64 (count,)."""
    return _rng(seed, epoch).permutation(np.arange(count, dtype=np.int64))


def in_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of `count` examples that are not shuffled."""
    return np.arange(count, dtype=np.int64)


def offsets(count: int, seed: int, epoch: int, length: int) -> np.ndarray:
    """Where `count` sequences of an epoch begin in a text of count * (length + 1) tokens: int64 (count,)."""
    return _rng(seed, epoch).integers(0, (count - 1) * (length + 1) + 1, count)


def _rng(seed: int, epoch: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(SHUFFLE_STREAM, epoch)))


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.buffer.write(permutation(*map(int, line.split())).tobytes())
        sys.stdout.buffer.flush()
