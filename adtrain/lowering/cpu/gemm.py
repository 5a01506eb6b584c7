"""The C functions for matrix products (`kernels/cpu/gemm.c` and `matmul_integers.c`)."""

from __future__ import annotations

import math
from typing import Any

from adtrain.core.kernel import CKernel
from adtrain.core.registry import register
from adtrain.lowering.cpu.shapes import in_full
from adtrain.lowering.shapes import product_lengths

SCRATCH = 1 << 20
"""Bytes for each thread: packed blocks of A and B, and a block of C."""
LONG, TOTAL = 1 << 12, 256 * (1024 + 64)
"""From so many summands on there may be groups of slices, and so many more bytes are needed for their total."""
MEMORY = {"SCRATCH_BYTES": SCRATCH, "TOTAL_BYTES": TOTAL, "LONG_SUM": LONG}
"""Macros of `gemm.c`."""


def _numbers(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> tuple[int, ...]:
    """batch, M, N, K and the flags."""
    in_full("matmul", precision)
    m, k = a.shape[:-3:-1] if transpose_a else a.shape[-2:]
    return math.prod(a.shape[:-2]), m, b.shape[-2 if transpose_b else -1], k, transpose_a, transpose_b


def _scratch(a: Any, b: Any, transpose_a: bool, transpose_b: bool, precision: str) -> int:
    return SCRATCH + (TOTAL if a.shape[-2 if transpose_a else -1] > LONG else 0)


register("matmul", "cpu", CKernel("gemm.c", "gemm", _numbers, team=True, scratch=_scratch, definitions=MEMORY))
register("matmul_integers", "cpu", CKernel("matmul_integers.c", "matmul_integers", product_lengths, team=True))
