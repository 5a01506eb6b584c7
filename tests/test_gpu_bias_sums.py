"""The GPU: gradients that are computed together with the sum of what they read are right, and twice the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_kernels import run_twice
from gpu_parity import gpu, poisoned
from test_bias_sums import POOLINGS, put_arguments
from test_gpu_products import distance

from adtrain.core.registry import cuda_kernels
from adtrain.core.types import ArrayType
from adtrain.ops.bias_sums import max_pool2d_put_sum_p
from adtrain.ops.pool import Windows

__all__ = ["gpu", "poisoned"]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("shape", "windows"), [*POOLINGS, ((200, 64, 24, 24), Windows((2, 2), (2, 2), (0, 0)))])
def test_what_is_put_is_summed(gpu: Any, shape: tuple[int, ...], windows: Windows, dtype: str) -> None:
    arrays = put_arguments(shape, windows, dtype)
    params = {"windows": windows, "shape": shape}
    types = (ArrayType(v.shape, v.dtype) for v in arrays)
    (kernel,) = cuda_kernels("max_pool2d_put_sum", gpu.lowering.target, *types, **params)
    spread, sums = run_twice(gpu, max_pool2d_put_sum_p, kernel, arrays, **params)
    expected, total = max_pool2d_put_sum_p.reference(arrays[0].astype(float), arrays[1], **params)
    np.testing.assert_allclose(spread, expected, rtol=1e-6 if dtype == "float32" else 1e-15, atol=1e-6)
    assert distance(sums, total) < (6e-7 if dtype == "float32" else 1e-14)
