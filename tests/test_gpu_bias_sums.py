"""The GPU: gradients that are computed together with the sum of what they read are right, and twice the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_parity import gpu, poisoned
from test_bias_sums import POOLINGS, put_arguments
from test_gpu_products import distance

from adtrain.core.kernel import CudaKernel
from adtrain.core.primitive import Primitive
from adtrain.core.types import ArrayType
from adtrain.ops.bias_sums import max_pool2d_put_sum_p
from adtrain.ops.pool import Windows

__all__ = ["gpu", "poisoned"]

pytestmark = pytest.mark.gpu


def both(
    gpu: Any, primitive: Primitive, kernel: CudaKernel, arrays: list[np.ndarray], **params: Any
) -> list[np.ndarray]:
    """The results of the primitive with this kernel, computed twice."""
    types = [ArrayType(v.shape, v.dtype) for v in arrays]
    named: Any = primitive.implementations
    before = named["cuda"]
    named["cuda"] = kernel
    gpu.known.clear()
    try:
        outs = primitive.output_types(types, params)
        buffers = [gpu.from_numpy(v) for v in arrays]
        runs = [gpu.run(primitive, buffers, params, outs) for _ in range(2)]
        first, second = ([gpu.to_numpy(b) for b in run] for run in runs)
    finally:
        named["cuda"] = before
        gpu.known.clear()
    assert [v.tobytes() for v in first] == [v.tobytes() for v in second]
    return first


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("shape", "windows"), [*POOLINGS, ((200, 64, 24, 24), Windows((2, 2), (2, 2), (0, 0)))])
def test_what_is_put_is_summed(gpu: Any, shape: tuple[int, ...], windows: Windows, dtype: str) -> None:
    arrays = put_arguments(shape, windows, dtype)
    params = {"windows": windows, "shape": shape}
    (kernel,) = max_pool2d_put_sum_p.implementations["cuda"](*(ArrayType(v.shape, v.dtype) for v in arrays), **params)
    spread, sums = both(gpu, max_pool2d_put_sum_p, kernel, arrays, **params)
    expected, total = max_pool2d_put_sum_p.reference(arrays[0].astype(float), arrays[1], **params)
    np.testing.assert_allclose(spread, expected, rtol=1e-6 if dtype == "float32" else 1e-15, atol=1e-6)
    assert distance(sums, total) < (6e-7 if dtype == "float32" else 1e-14)
