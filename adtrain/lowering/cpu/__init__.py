"""The C functions that compute each primitive on the CPU. Importing this package registers them."""

from adtrain.lowering.cpu import (  # noqa: F401
    attention,
    conv,
    conv_pooled,
    copy,
    gemm,
    index,
    norm,
    pool,
    random,
    recurrent,
    reduce,
    softmax,
    sort,
)
