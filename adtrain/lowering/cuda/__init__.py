"""The CUDA kernels that compute each primitive, and the rules that choose among them."""

from adtrain.lowering.cuda.gemm import matmul

__all__ = ["matmul"]
