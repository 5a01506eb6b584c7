"""The C functions for matrix products (`kernels/cpu/gemm.c`, `gemm_items.c` and `matmul_integers.c`)."""

from __future__ import annotations

import math
from typing import Any

from adtrain.core.kernel import CKernel, register
from adtrain.lowering.cpu.shapes import in_full
from adtrain.lowering.shapes import product_lengths

SCRATCH = 1 << 20
"""Bytes for each thread: packed blocks of A and B, and a block of C."""
LONG, TOTAL = 1 << 12, 256 * (1024 + 64)
"""From so many summands on there may be groups of slices, and so many more bytes are needed for their total."""
MEMORY = {"SCRATCH_BYTES": SCRATCH, "TOTAL_BYTES": TOTAL, "LONG_SUM": LONG}
"""Macros of `gemm.c`."""

PANEL = 128
"""Maximum bytes of a row of a panel in `kernels/cpu/tile.h`."""
MIN_ROWS = 1024
"""With fewer rows, packing a small matrix for each thread takes too much of the time."""
MIN_MATRICES = 256
"""With fewer matrices there is too little work for many threads."""
MAX_WEIGHTS = 12 << 10
"""Maximum bytes of a small matrix. With a larger one the product takes most of the time, and `gemm.c` is faster."""
MAX_DEPTH = 2048
"""Maximum bytes of a row; `gemm.c` splits longer sums into slices."""


def _numbers(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> tuple[int, ...]:
    """batch, M, N, K and the flags."""
    in_full("matmul", precision)
    m, k = a.shape[:-3:-1] if transpose_a else a.shape[-2:]
    return math.prod(a.shape[:-2]), m, b.shape[-2 if transpose_b else -1], k, transpose_a, transpose_b


def _scratch(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> int:
    return SCRATCH + (TOTAL if a.shape[-2 if transpose_a else -1] > LONG else 0)


def _is_small(rows: int, k: int, n: int, itemsize: int) -> bool:
    """Whether a product of so many rows with a (k, n) matrix is fast row by row."""
    return rows >= MIN_ROWS and k <= MAX_DEPTH // itemsize and 0 < k * n * itemsize <= MAX_WEIGHTS


def _by_row(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> bool:
    """Whether it is a product of many rows with a small matrix."""
    if len(a.shape) != 2 or transpose_a:
        return False
    return _is_small(a.shape[0], a.shape[1], b.shape[0 if transpose_b else 1], a.dtype.itemsize)


def _row_numbers(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> tuple[int, ...]:
    """rows, N, K and the flag of B."""
    in_full("matmul", precision)
    _, rows, n, k, _, transposed = _numbers(a, b, transpose_a, transpose_b, precision)
    return rows, n, k, transposed


def _prepared(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> int:
    _, n, k, _ = _row_numbers(a, b, transpose_a, transpose_b, precision)
    return k * _padded(n, a.dtype.itemsize)


def _sums_rows(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> bool:
    """Whether it is a small product that is a sum over many rows of both factors."""
    if len(a.shape) != 2 or not transpose_a or transpose_b:
        return False
    rows, m = a.shape
    return rows >= MIN_ROWS and 0 < m * _padded(b.shape[1], a.dtype.itemsize) <= MAX_WEIGHTS


def _sum_numbers(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> tuple[int, ...]:
    """rows, M and N."""
    in_full("matmul", precision)
    return a.shape[-2], a.shape[-1], b.shape[-1]


def _sum_scratch(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> int:
    """Bytes of the rows of B as panels."""
    return int(a.shape[-2]) * _padded(b.shape[-1], a.dtype.itemsize)


def _collected(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> int:
    """Bytes of the sums."""
    return int(a.shape[-1]) * _padded(b.shape[-1], a.dtype.itemsize)


def _by_matrix(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> bool:
    """Whether it is products of many small matrices."""
    if len(a.shape) < 3 or a.shape[0] < MIN_MATRICES:
        return False
    _, m, n, k, _, _ = _numbers(a, b, transpose_a, transpose_b, precision)
    return k <= MAX_DEPTH // a.dtype.itemsize and max(m * k, k * n, m * n) * a.dtype.itemsize <= MAX_WEIGHTS


def _matrix_scratch(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> int:
    """Bytes of B as panels."""
    _, _, n, k, _, _ = _numbers(a, b, transpose_a, transpose_b, precision)
    return k * _padded(n, a.dtype.itemsize)


def _padded(n: int, itemsize: int) -> int:
    """Bytes of n numbers in whole panels of `kernels/cpu/tile.h`."""
    return -(-n * itemsize // PANEL) * PANEL


register(
    "matmul",
    "cpu",
    (
        CKernel("gemm.c", "gemm", _numbers, team=True, scratch=_scratch, definitions=MEMORY),
        CKernel("gemm_items.c", "gemm_rows", _row_numbers, items=_by_row, several_items=True, prepared=_prepared),
        CKernel(
            "gemm_items.c",
            "gemm_sum",
            _sum_numbers,
            items=_sums_rows,
            several_items=True,
            sums=True,
            scratch=_sum_scratch,
            collected=_collected,
        ),
        CKernel(
            "gemm_items.c",
            "gemm_matrices",
            _numbers,
            items=_by_matrix,
            several_items=True,
            scratch=_matrix_scratch,
        ),
    ),
)
register("matmul_integers", "cpu", CKernel("matmul_integers.c", "matmul_integers", product_lengths, team=True))
