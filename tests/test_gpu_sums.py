"""On a GPU, the error of sums hardly grows with their length, and max pooling chooses the same elements as NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_parity import gpu, poisoned
from program_samples import ON_GPU
from test_pool_positions import POOLINGS, SPECIAL, pooled
from test_sum_accuracy import BOUND, SUMS

import adtrain as ad
from adtrain.core.staging import stage

__all__ = ["gpu", "poisoned"]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("equal", [True, False], ids=["equal", "random"])
def test_the_error_of_a_float32_sum_is_bounded(gpu: Any, name: str, equal: bool) -> None:
    f, reference, shape = SUMS[name]
    x = np.full(shape, 0.1, np.float32) if equal else np.random.default_rng(0).random(shape, np.float32)
    expected = reference(x.astype(np.float64))
    for run in (f, stage(f, ON_GPU)):
        assert np.abs(run(ad.array(x, device="gpu")).numpy() / expected - 1).max() <= BOUND


@pytest.mark.parametrize(("kernel", "stride", "padding"), POOLINGS)
def test_max_pooling_of_special_numbers_is_that_of_numpy(gpu: Any, kernel: Any, stride: Any, padding: Any) -> None:
    x = np.random.default_rng(0).choice(np.array(SPECIAL, np.float32), (20, 2, 9, 10))
    f = pooled(kernel, stride, padding)
    shape = ad.ops.max_pool2d(x, kernel, stride, padding).shape
    weights = np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)
    for expected, found in zip(
        f(x, weights), f(ad.array(x, device="gpu"), ad.array(weights, device="gpu")), strict=True
    ):
        np.testing.assert_array_equal(found.numpy(), expected.numpy())
