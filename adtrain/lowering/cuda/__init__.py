"""The CUDA kernels that compute each primitive, and the rules that choose among them. Importing it registers them."""

from adtrain.lowering.cuda import (  # noqa: F401
    attention,
    conv,
    gemm,
    indexing,
    recurrent,
    reduce,
)
