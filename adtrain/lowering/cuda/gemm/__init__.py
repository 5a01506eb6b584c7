"""Registers the CUDA kernels for matrix products."""

from typing import Any

from adtrain.core.kernel import CudaKernel, CudaLaunch, Target, register
from adtrain.lowering.cuda.gemm import bfloat16
from adtrain.lowering.cuda.gemm.matmul import candidates
from adtrain.lowering.shapes import product_lengths


def _integers(target: Target, a: Any, b: Any) -> list[CudaKernel]:
    lengths = batch, m, n, _ = product_lengths(a, b)
    launch = CudaLaunch("gemm/matmul_integers.cu", "matmul_integers", lengths, (a.dtype,), elements=batch * m * n)
    return [CudaKernel((launch,))]


register("matmul", "cuda", candidates)
register("matmul_bfloat16", "cuda", bfloat16.candidates)
register("matmul_integers", "cuda", _integers)
