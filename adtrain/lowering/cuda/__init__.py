"""The CUDA kernels that compute each primitive, and the rules that choose among them. Importing it registers them."""

from adtrain.lowering.cuda import conv, pool

__all__ = ["conv", "pool"]
