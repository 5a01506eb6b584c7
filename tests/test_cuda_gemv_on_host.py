"""`gemm/gemv.cu` and `gemm/short_gemm.cu`, emulated on the CPU, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_on_host import Host, host
from program_samples import ON_GPU

from adtrain import ops
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.core.kernel import cuda_kernels
from adtrain.core.program import Equation, Variable
from adtrain.core.staging import stage
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda import gemm
from adtrain.lowering.cuda.gemm import MIN_BATCH
from adtrain.ops.matmul import matmul_p

__all__ = ["host"]

TOLERANCE = 3e-7
"""Of the norm of the difference over the norm."""


def product(host: Host, kernel: str, batch: int, m: int, n: int, k: int, ta: bool, tb: bool) -> None:
    """Compare the preferred kernel of a product, which has this name, with NumPy."""
    rng = np.random.default_rng(m)
    shapes = (batch, k, m) if ta else (batch, m, k), (batch, n, k) if tb else (batch, k, n)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    a, b = (Variable(ArrayType(x.shape, x.dtype), "gpu") for x in arrays)
    params = {"transpose_a": ta, "transpose_b": tb, "precision": "full"}
    out = Variable(ArrayType((batch, m, n), a.type.dtype), "gpu")
    preferred = cuda_kernels("matmul", H200, a.type, b.type, **params)[0]
    assert preferred.launches[0].name == kernel
    (found,) = host.computed(Equation(matmul_p, (a, b), params, (out,)), preferred, arrays)
    x, y = (v.astype(float) for v in arrays)
    expected = (x.swapaxes(1, 2) if ta else x) @ (y.swapaxes(1, 2) if tb else y)
    assert np.linalg.norm(found - expected) <= TOLERANCE * np.linalg.norm(expected)


@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k", "tb"), [(33, 1, 70, False), (1, 40, 36, False), (1, 40, 36, True), (1, 1, 5, True)]
)
def test_a_batch_of_matrices_by_vectors_is_right(host: Host, m: int, n: int, k: int, ta: bool, tb: bool) -> None:
    product(host, "gemv", 3, m, n, k, ta, tb)


@pytest.mark.parametrize(
    ("m", "n", "k", "ta", "tb"), [(4, 4, 4, False, False), (3, 6, 2, True, False), (8, 1, 5, False, True)]
)
def test_a_batch_of_many_small_matrices_is_right(host: Host, m: int, n: int, k: int, ta: bool, tb: bool) -> None:
    product(host, "short_gemm", MIN_BATCH + 1, m, n, k, ta, tb)


@pytest.mark.parametrize(
    ("m", "n", "k", "ta", "tb"),
    [(72, 36, 8, False, False), (20, 22, 5, False, True), (64, 33, 16, True, False), (48, 64, 12, True, True)],
)
def test_a_product_of_few_terms_is_right(
    host: Host, m: int, n: int, k: int, ta: bool, tb: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for minimum in ("MIN_SHORT", "MIN_SHORT_THREADS"):
        monkeypatch.setattr(gemm, minimum, 1)
    product(host, "short_gemm", 1, m, n, k, ta, tb)


def test_small_matrices_have_an_epilogue(host: Host) -> None:
    def f(a: Any, b: Any, c: Any) -> Any:
        return ops.tanh(a @ b + c) * c

    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((MIN_BATCH, 4, 4)).astype(np.float32) for _ in range(3)]
    (equation,) = stage(f, ON_GPU).program(*arrays).equations
    (launch,) = host.lowering.launches(equation)
    assert isinstance(launch, LaunchPlan)
    assert launch.name == "short_gemm"
    (found,) = host.computed(equation, None, arrays)
    np.testing.assert_allclose(found, f(*arrays).numpy(), rtol=1e-5, atol=1e-6)
