"""Registers the CUDA kernels for matrix products."""

from adtrain.core.registry import register
from adtrain.lowering.cuda.gemm.matmul import candidates

register("matmul", "cuda", candidates)
