"""Products without tiles, because a length is small: many small matrices (`gemm/tiny_gemm.cu`) and a matrix by a vector
(`gemm/gemv.cu`).

Lengths are batch, M, N and K. `transposed` says whether A and B are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.target import WARP
from adtrain.lowering.cuda.gemm.tiles import transposes

MAX_TINY = 8
"""The largest M, N and K of small matrices. A thread has N sums in registers."""
MIN_BATCH = 1 << 12
"""Minimum of small matrices. Other kernels have a thread block for each, of which most threads have no work."""
GEMV_THREADS = {False: 256, True: 1024}
"""Threads of a block of `gemm/gemv.cu`, by whether it reads the matrix along its columns (COLUMNS)."""
GEMV_COLUMN_LANES = 8
"""Threads of a row in a block of `gemm/gemv.cu` that reads along columns."""


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
