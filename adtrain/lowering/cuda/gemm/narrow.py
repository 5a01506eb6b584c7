"""Products without tiles, because a length is small: many small matrices (`gemm/tiny_gemm.cu`), a matrix by a vector
(`gemm/gemv.cu`), and a short K in a rounded precision (`gemm/short_k.cu`).

Lengths are batch, M, N and K. `transposed` says whether A and B are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from adtrain.core.kernel import MAX_GRID, CudaKernel, CudaLaunch
from adtrain.core.precision import mantissa
from adtrain.lowering.cuda.gemm.tiles import WARP, transposes

MAX_TINY = 8
"""The largest M, N and K of small matrices. A thread has N sums in registers."""
MIN_BATCH = 1 << 12
"""Minimum of small matrices. Other kernels have a thread block for each, of which most threads have no work."""
GEMV_THREADS = {False: 256, True: 1024}
"""Threads of a block of `gemm/gemv.cu`, by whether it reads the matrix along its columns (COLUMNS)."""
GEMV_COLUMN_LANES = 8
"""Threads of a row in a block of `gemm/gemv.cu` that reads along columns."""
MAX_SHORT_K = 16
"""The largest short K. A thread has this many registers for each of its columns."""
MAX_WIDE_K = 10
"""The largest K for which a thread may have 2 WIDE columns."""
MIN_ELEMENTS = 1 << 20
"""Minimum elements of the result of a short K. To store it then takes most of the time."""
THREADS, WIDE, ROWS = 256, 4, 32
"""With a short K: threads of a block; minimum of neighbouring columns of a thread; rows of a block."""
START, BYTES_PER_CYCLE = 3800, 2000
"""With a short K: cycles of a launch; bytes of the result that are computed and stored in a cycle."""


def has_tiny_matrices(lengths: Sequence[int]) -> bool:
    """Whether there are many matrices, all of them small."""
    batch, *others = lengths
    return batch >= MIN_BATCH and 0 < min(others) <= max(others) <= MAX_TINY


def tiny_gemm(lengths: Sequence[int], dtype: np.dtype, transposed: tuple[bool, bool]) -> CudaKernel:
    batch, m, n, k = lengths
    stored = math.gcd(n, 16 // dtype.itemsize)
    definitions = {"LENGTH_M": m, "LENGTH_N": n, "LENGTH_K": k, "STORED": stored, **transposes(transposed)}
    file, name, rows = "gemm/tiny_gemm.cu", "tiny_gemm", batch * m
    return CudaKernel((CudaLaunch(file, name, (rows,), (dtype,), elements=rows, definitions=definitions),))


def gemv(lengths: Sequence[int], dtype: np.dtype, transposed: tuple[bool, bool]) -> CudaKernel:
    batch, m, n, k = lengths
    matrix_b = n != 1
    length = n if matrix_b else m
    columns = (not transposed[1]) if matrix_b else transposed[0]
    width = math.gcd(16 // dtype.itemsize, length if columns else k)
    threads = GEMV_THREADS[columns]
    per_block = GEMV_COLUMN_LANES * width if columns else threads // WARP  # elements of the result
    launch = CudaLaunch(
        "gemm/gemv.cu",
        "gemv",
        (batch, length, k),
        (dtype,),
        blocks=-(-length // per_block) * batch,
        threads=threads,
        definitions={"COLUMNS": int(columns), "MATRIX_B": int(matrix_b), "WIDE_A": width},
    )
    return CudaKernel((launch,))


def has_short_k(lengths: Sequence[int]) -> bool:
    """Whether K is short and the result is large."""
    batch, m, n, k = lengths
    grid = max(batch, -(-m // ROWS)) <= MAX_GRID[1]
    return 0 < k <= MAX_SHORT_K and n % WIDE == 0 and batch * m * n >= MIN_ELEMENTS and grid


def short_k_gemm(lengths: Sequence[int], transposed: tuple[bool, bool], precision: str) -> CudaKernel:
    batch, m, n, k = lengths
    definitions = {
        "LENGTH_K": k,
        "THREADS": THREADS,
        "MIN_WIDE": WIDE,
        "WIDE_C": math.gcd(2 * WIDE if k <= MAX_WIDE_K else WIDE, n),
        "ROWS": ROWS,
        "MANTISSA": mantissa(precision),
        **transposes(transposed),
    }
    launch = CudaLaunch(
        "gemm/short_k.cu",
        "short_k_gemm",
        (batch, m, n),
        (np.dtype(np.float32),),
        blocks=(-(-n // (THREADS * WIDE)), -(-m // ROWS), batch),
        threads=THREADS,
        definitions=definitions,
    )
    return CudaKernel((launch,), cycles=START + batch * m * n * 4 / BYTES_PER_CYCLE)
