"""Products of many matrices of a few rows and columns, without rounding (`gemm/tiny_gemm.cu`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from adtrain.core.kernel import CudaKernel, CudaLaunch

MAX_LENGTH = 8
"""The largest M, N and K. A thread has N sums in registers."""
MIN_BATCH = 1 << 12
"""Minimum matrices. Other kernels have a thread block for each, of which most threads have no work."""


@dataclass(frozen=True)
class TinyGemm:
    """A batch of matrix products by `gemm/tiny_gemm.cu`.

    Attributes:
        lengths: batch, M, N and K.
        transposed: whether A and B are.
    """

    lengths: tuple[int, int, int, int]
    dtype: np.dtype
    transposed: tuple[bool, bool]

    def suits(self) -> bool:
        """Whether there are many matrices, all of them small."""
        batch, *lengths = self.lengths
        return batch >= MIN_BATCH and min(lengths) > 0 and max(lengths) <= MAX_LENGTH

    def kernel(self) -> CudaKernel:
        batch, m, n, k = self.lengths
        definitions = {
            **{f"LENGTH_{x}": length for x, length in zip("MNK", (m, n, k), strict=True)},
            **{f"TRANSPOSE_{x}": int(t) for x, t in zip("AB", self.transposed, strict=True)},
            "STORED": math.gcd(n, 16 // self.dtype.itemsize),
        }
        launch = CudaLaunch(
            "gemm/tiny_gemm.cu", "tiny_gemm", (batch * m,), (self.dtype,), elements=batch * m, definitions=definitions
        )
        return CudaKernel((launch,))
