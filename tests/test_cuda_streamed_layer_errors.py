"""The product of `gemm/streamed_layer.cuh` emulated: about as exact as sequential FMA."""

from __future__ import annotations

import numpy as np
import pytest
from packed_gemm_emulated import NOISE, errors, sequential_fma, tensor_core_sum

GROUPS = 4
"""Groups of warps of a block, which divide the chunks of K."""


def streamed_product(weights: np.ndarray, examples: np.ndarray) -> np.ndarray:
    """W X of bytes X. A group has every GROUPS-th chunk of K. The sums of the groups are added in order."""
    high = (weights * 128).astype(np.float16).astype(float)
    low = (weights * 128 - high).astype(np.float16).astype(float)
    total = np.zeros((len(weights), examples.shape[1]), np.float32)
    for group in range(GROUPS):
        sums = np.zeros(total.shape)
        for i in range(16 * group, weights.shape[1], 16 * GROUPS):
            k = slice(i, i + 16)
            sums = tensor_core_sum(sums, low[:, k], examples[k].T)
            sums = tensor_core_sum(sums, high[:, k], examples[k].T)
        total += sums.astype(np.float32)
    return total.astype(float) / 128


@pytest.mark.parametrize(
    ("share", "positive", "times"),
    [
        (1.0, False, NOISE),
        (0.19, False, 1.25),  # as many pixels are not zero as in digits
        (0.19, True, 1.65),  # tensor cores truncate, and all errors have one sign
    ],
)
def test_its_error_is_at_most_so_many_times_that_of_sequential_fma(share: float, positive: bool, times: float) -> None:
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.04, (64, 784)).astype(np.float32).astype(float)
    weights = np.abs(weights) if positive else weights
    pixels = rng.integers(0, 256, (784, 48)) * (rng.uniform(size=(784, 48)) < share).astype(float)
    (_, norm), (_, chain) = (errors(f(weights, pixels), weights, pixels) for f in (streamed_product, sequential_fma))
    assert norm <= times * chain, (norm, chain)
