"""The order of an epoch's examples. As a program it computes orders for another process; it imports NumPy only."""

from __future__ import annotations

import sys

import numpy as np

SHUFFLE_STREAM = 1
"""The random stream of orders. Each use of a seed has a stream of its own: it does not change the numbers of others."""


def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of `count` examples in an epoch: int64 (count,)."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(SHUFFLE_STREAM, epoch)))
    return rng.permutation(np.arange(count, dtype=np.int64))


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.buffer.write(permutation(*map(int, line.split())).tobytes())
        sys.stdout.buffer.flush()
