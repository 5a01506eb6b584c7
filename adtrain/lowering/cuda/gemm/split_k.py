"""The second pass of split-K: the launch that adds the partial sums (`kernels/cuda/gemm/split_k_sum.cu`)."""

from __future__ import annotations

import numpy as np

from adtrain.core.kernel import CudaKernel, CudaLaunch

THREADS = 256
"""Threads of a block."""
GROUPS, MAX_GROUPED_SIZE, MIN_GROUPED_SPLITS = 8, 1 << 16, 16
"""Threads that share an element where there are at most so many elements, and at least so many splits."""


def split_k_sum(dtype: np.dtype, batch: int, m: int, n: int, splits: int, by_member: bool = False) -> CudaLaunch:
    """Adds ``splits`` partial sums of ``batch`` matrices m x n, which lie one after another in scratch.

    With ``by_member`` the matrices are those of any number of members, on which the order of a sum must not depend.
    """
    size = batch * m * n
    groups = GROUPS if (by_member or size <= MAX_GROUPED_SIZE) and splits >= MIN_GROUPED_SPLITS else 1
    return CudaLaunch(
        "gemm/split_k_sum.cu",
        "split_k_sum",
        (size, m, n, splits),
        (dtype,),
        blocks=-(-size * groups // THREADS),
        threads=THREADS,
        definitions={"GROUPS": groups},
    )


def with_split_k(
    product: CudaLaunch, dtype: np.dtype, batch: int, m: int, n: int, splits: int, by_member: bool = False
) -> CudaKernel:
    """A product, and with split-K the sum of the splits, which lie in scratch."""
    if splits == 1:
        return CudaKernel((product,))
    second = split_k_sum(dtype, batch, m, n, splits, by_member)
    return CudaKernel((product, second), splits * batch * m * n * dtype.itemsize)
