"""The C functions that compute each primitive on the CPU. Importing this package registers them."""

from adtrain.lowering.cpu import (  # noqa: F401
    attention,
    conv,
    gemm,
    hash_grid,
    moves,
    recurrent,
    reduce,
)
