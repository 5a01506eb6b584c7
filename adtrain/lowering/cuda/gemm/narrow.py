"""Products of a matrix by one of few columns, both bfloat16 in memory, on Hopper (`gemm/bfloat16_narrow.cu`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from adtrain.core.kernel import WARP, CudaKernel, CudaLaunch, Target

COLUMNS = 8, 16
"""The numbers of columns. The kernel needs accumulators for each."""
WARPS, ROWS = 16, 64
"""Warps and rows of a block."""
STEP = {True: 32, False: 16}
"""K of a step of a warp, by whether K is the last axis of the wide matrix."""
CLUSTERS = 1, 2, 4, 8
START, WAVE, BYTES_PER_CYCLE = 4000, 3000, 15
"""Cycles of a launch, and of the start and end of a block; bytes that a multiprocessor reads in a cycle. Estimates."""


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
    tiles = sum(-(-max(shape) // ROWS) for shape in shapes)

    def cycles(cluster: int) -> float:
        """Estimated, of a number of blocks that divide the K of a tile."""
        waves = -(-tiles * cluster // target.multiprocessors)
        return START + waves * (WAVE + ROWS * k * 2 / cluster / BYTES_PER_CYCLE)

    cluster = min((x for x in CLUSTERS if x == 1 or x * WARPS * STEP[wide_k] <= k), key=cycles)
    launch = CudaLaunch(
        "gemm/bfloat16_narrow.cu",
        "narrow_products",
        (k, *(length for shape in shapes for length in shape)),
        (np.dtype(np.float32),),
        blocks=tiles * cluster,
        threads=WARPS * WARP,
        shared=WARPS * ROWS * columns * 4,
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
