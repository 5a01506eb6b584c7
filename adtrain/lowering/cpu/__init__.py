"""The C functions that compute each primitive on the CPU."""

from adtrain.lowering.cpu import gemm

__all__ = ["gemm"]
