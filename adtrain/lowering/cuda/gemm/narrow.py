"""Products of a matrix by one of few columns, both bfloat16 in memory, on Hopper (`gemm/bfloat16_narrow.cu`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from adtrain.core.kernel import CudaKernel, CudaLaunch, Target

COLUMNS = 8, 16
"""The numbers of columns. The kernel needs accumulators for each."""
WARPS, WARP_THREADS = 8, 32
STEP = {True: 32, False: 16}
"""K of a step of a warp, by whether K is the last axis of the wide matrix."""
ROWS = {True: 32, False: 64}
"""Rows of a block, by the same."""
CLUSTERS = 1, 2, 4, 8
START, BYTES_PER_CYCLE, OF_BLOCK = 4000, 15, 8
"""Cycles of a launch; bytes that a multiprocessor, and one block, read in a cycle. Estimates."""


def narrow_products(
    target: Target, shapes: Sequence[tuple[int, int]], k: int, mn_major: tuple[bool, bool]
) -> CudaKernel | None:
    """The kernel for products of the same K; None if it does not suit them.

    Args:
        shapes: M and N of each product. The smaller one is the number of columns, equal in all products.
        mn_major: of A and B, whether it is not K-major.
    """
    columns = min(shapes[0])
    along_k = {tuple(not x for x in (mn_major if n == columns else mn_major[::-1])) for _, n in shapes}
    if columns not in COLUMNS or {*map(min, shapes)} != {columns} or len(along_k) > 1:
        return None
    ((wide_k, narrow_k),) = along_k
    tiles = sum(-(-max(shape) // ROWS[wide_k]) for shape in shapes)

    def cycles(cluster: int) -> float:
        """Estimated, of a number of blocks that divide the K of a tile."""
        blocks = -(-tiles * cluster // target.multiprocessors)
        return START + blocks * ROWS[wide_k] * k * 2 / cluster / min(BYTES_PER_CYCLE, blocks * OF_BLOCK)

    cluster = min((x for x in CLUSTERS if x == 1 or x * WARPS * STEP[wide_k] <= k), key=cycles)
    launch = CudaLaunch(
        "gemm/bfloat16_narrow.cu",
        "narrow_products",
        (k, *(length for shape in shapes for length in shape)),
        (np.dtype(np.float32),),
        blocks=tiles * cluster,
        threads=WARPS * WARP_THREADS,
        shared=WARPS * ROWS[wide_k] * columns * 4,
        definitions={
            "PRODUCTS": len(shapes),
            "COLUMNS": columns,
            "CLUSTER": cluster,
            "WIDE_K": int(wide_k),
            "NARROW_K": int(narrow_k),
            "WIDE_C": math.gcd(8, *(n for _, n in shapes)),
        },
    )
    return CudaKernel((launch,), cycles=cycles(cluster))
