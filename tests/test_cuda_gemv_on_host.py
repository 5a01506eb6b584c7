"""`gemm/gemv.cu`, emulated on the CPU, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_on_host import Host, host

from adtrain.backends.cuda.targets import H200
from adtrain.core.program import Equation, Variable
from adtrain.core.registry import cuda_kernels
from adtrain.core.types import ArrayType
from adtrain.ops.matmul import matmul_p

__all__ = ["host"]

TOLERANCE = 3e-7
"""Of the norm of the difference over the norm."""


@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(33, 1, 70), (1, 40, 36), (1, 1, 5)])
def test_a_batch_of_matrices_by_vectors_is_right(host: Host, m: int, n: int, k: int, ta: bool, tb: bool) -> None:
    rng = np.random.default_rng(m)
    shapes = (3, k, m) if ta else (3, m, k), (3, n, k) if tb else (3, k, n)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    a, b = (Variable(ArrayType(x.shape, x.dtype), "gpu") for x in arrays)
    params = {"transpose_a": ta, "transpose_b": tb, "precision": "full"}
    out = Variable(ArrayType((3, m, n), a.type.dtype), "gpu")
    kernel = cuda_kernels("matmul", H200, a.type, b.type, **params)[0]
    assert kernel.launches[0].name == "gemv"
    (found,) = host.computed(Equation(matmul_p, (a, b), params, (out,)), kernel, arrays)
    x, y = (v.astype(float) for v in arrays)
    expected = (x.swapaxes(1, 2) if ta else x) @ (y.swapaxes(1, 2) if tb else y)
    assert np.linalg.norm(found - expected) <= TOLERANCE * np.linalg.norm(expected)
