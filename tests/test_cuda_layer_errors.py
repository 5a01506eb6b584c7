"""The errors of `gemm/streamed_layer.cuh` and `gemm/layer_backward.cuh`, emulated, and those of sequential FMA."""

from __future__ import annotations

import numpy as np
import pytest
from product_samples import NOISE, TWO_ROUNDINGS, errors, hard, sequential_fma, tensor_core_sum, usual

M, N, K = 64, 48, 64
GROUPS = 4
"""Groups of warps of a streamed layer, which divide the chunks of K."""
LESS_EXACT = {
    "cancelling to 0.03": 3.5,
    "cancelling to 0.1": 3.4,
    "cancelling to 0.3": 2,
    "an element near the end 30 times as large": 1.8,
    "an element near the end 100 times as large": 2.4,
    "an element near the end 200 times as large": 2.6,
    "an element near the end 1000 times as large": 2.3,
    "some rows sparse, 100 times, cancelling": 1.3,
    "digits": 1.3,
    "weights that are all positive": 1.65,
}
"""Inputs with a larger error of the norm than sequential FMA, and how many times as large."""


def scales(x: np.ndarray, axis: int | None) -> np.ndarray:
    """Powers of two that bring the largest magnitudes to [2^14, 2^15)."""
    largest = np.abs(x).max(axis, keepdims=True)
    return np.ldexp(1.0, 15 - np.maximum(np.frexp(largest)[1], -111))


def terms(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    high = x.astype(np.float16).astype(float)
    return high, (x - high).astype(np.float16).astype(float)


def added(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a.astype(np.float32) + b.astype(np.float32)).astype(float)


def weight_gradient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A B with scales of columns of A, then of its rows and of columns of B.

    Products of 16 k of the high terms are added in float32.
    """
    examples = scales(a, 0)
    a, b = a * examples, b / examples.T
    rows, columns = scales(a, 1), scales(b, 0)
    (a_high, a_low), (b_high, b_low) = terms(a * rows), terms((b * columns).T)
    low, total = np.zeros((len(a), b.shape[1])), np.zeros((len(a), b.shape[1]))
    for i in range(0, a.shape[1], 16):
        k = slice(i, i + 16)
        low = tensor_core_sum(low, a_low[:, k], b_high[:, k])
        low = tensor_core_sum(low, a_high[:, k], b_low[:, k])
        total = added(total, tensor_core_sum(np.zeros_like(low), a_high[:, k], b_high[:, k]))
    return added(total, low) / rows / columns


def input_gradient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A B with scales of rows of A, then of its columns, and of tiles of B times the inverse scales of the columns.

    Two groups of warps have every second tile.
    """
    examples = scales(a, 1)
    a = a * examples
    units = scales(a, 0)
    a_high, a_low = terms(a * units)
    sums = np.zeros((2, len(a), b.shape[1]))
    for i in range(0, a.shape[1], 16):
        for j in range(0, b.shape[1], 16):
            k, n = slice(i, i + 16), slice(j, j + 16)
            tile = b[k, n] / units.T[k]
            scale = scales(tile, None)
            high, low = terms((tile * scale).T)
            found = tensor_core_sum(np.zeros((len(a), len(high))), a_low[:, k], high)
            found = tensor_core_sum(found, a_high[:, k], low)
            found = tensor_core_sum(found, a_high[:, k], high) / scale
            sums[i // 16 % 2, :, n] = (sums[i // 16 % 2, :, n] + found).astype(np.float32)
    return added(sums[0], sums[1]) / examples


def streamed_product(weights: np.ndarray, examples: np.ndarray) -> np.ndarray:
    """W X of bytes X: the groups have every GROUPS-th chunk, and are added in order."""
    high, low = terms(weights * 128)
    total = np.zeros((len(weights), examples.shape[1]))
    for group in range(GROUPS):
        sums = np.zeros_like(total)
        for i in range(16 * group, weights.shape[1], 16 * GROUPS):
            k = slice(i, i + 16)
            sums = tensor_core_sum(sums, low[:, k], examples[k].T)
            sums = tensor_core_sum(sums, high[:, k], examples[k].T)
        total = added(total, sums)
    return total / 128


def assert_exact(name: str, found: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    (_, norm), (_, chain) = errors(found, a, b), errors(sequential_fma(a, b), a, b)
    assert norm <= max(LESS_EXACT.get(name, NOISE) * chain, TWO_ROUNDINGS), (name, norm, chain)


@pytest.mark.parametrize("product", [weight_gradient, input_gradient])
def test_gradients_are_as_exact_as_sequential_fma_but_for_the_listed_inputs(product: object) -> None:
    assert callable(product)
    for name, (a, b) in (usual(M, N, K) | hard(M, N, K)).items():
        x, y = a.astype(np.float32).astype(float), b.astype(np.float32).astype(float)
        assert_exact(name, product(x, y), x, y)


def test_a_product_of_bytes_is_as_exact_as_sequential_fma_but_for_the_listed_inputs() -> None:
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.04, (M, 784)).astype(np.float32).astype(float)
    pixels = rng.integers(0, 256, (784, N)).astype(float)
    cases = {
        "bytes": (weights, pixels),
        "digits": (weights, pixels * (rng.uniform(size=pixels.shape) < 0.19)),
        "weights that are all positive": (np.abs(weights), pixels * (rng.uniform(size=pixels.shape) < 0.19)),
    }
    for name, (a, b) in cases.items():
        assert_exact(name, streamed_product(a, b), a, b)
