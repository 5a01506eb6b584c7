"""Samplers: functions that draw an input of an operation, for the case table and for benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from adtrain import ops

Sampler: TypeAlias = Callable[[np.random.Generator], np.ndarray]


def normal(*shape: int) -> Sampler:
    return lambda rng: rng.normal(size=shape)


def between(low: float, high: float, *shape: int) -> Sampler:
    return lambda rng: rng.uniform(low, high, size=shape)


def apart(*shape: int, kinks: tuple[float, ...] = (0.0,)) -> Sampler:
    """Uniform numbers in [-2, 2], moved to a distance of at least 0.1 from the kinks."""

    def make(rng: np.random.Generator) -> np.ndarray:
        x = rng.uniform(-2, 2, size=shape)
        for kink in kinks:
            x = np.where(np.abs(x - kink) < 0.1, kink + np.where(x < kink, -0.1, 0.1) + (x - kink), x)
        return x

    return make


def distinct(*shape: int) -> Sampler:
    """Numbers with pairwise distances of at least 0.05, in random order."""

    def make(rng: np.random.Generator) -> np.ndarray:
        count = int(np.prod(shape))
        return ((rng.permutation(count) - count / 2) * 0.1 + rng.uniform(-0.02, 0.02, count)).reshape(shape)

    return make


def integers(high: int, *shape: int) -> Sampler:
    return lambda rng: rng.integers(0, high, size=shape)


def rng_state(rng: np.random.Generator) -> np.ndarray:
    """A sampler of random states."""
    return ops.rng_state(seed=int(rng.integers(2**63)), step=3).numpy()


def short(*shape: int) -> Sampler:
    """Multiples of 1/8 in [-7/8, 7/8]: they have three bits, so rounding to tf32 or bfloat16 does not change them."""
    return lambda rng: rng.integers(-7, 8, size=shape) / 8
