"""Products with a short K, in a rounded precision (`gemm/short_k.cu`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from adtrain.core.kernel import MAX_GRID, CudaKernel, CudaLaunch
from adtrain.core.precision import mantissa

MAX_K = 16
"""The largest K. A thread has this many registers for each of its columns."""
MAX_WIDE_K = 10
"""The largest K for which a thread may have 2 WIDE columns."""
MIN_ELEMENTS = 1 << 20
"""Minimum elements of a result. To store it then takes most of the time."""
THREADS, WIDE, ROWS = 256, 4, 32
"""Threads of a block; minimum of neighbouring columns of a thread; rows of a block."""
START, BYTES_PER_CYCLE = 3800, 2000
"""Cycles of a launch; bytes of the result that are computed and stored in a cycle."""
FLOAT32 = np.dtype("float32")


@dataclass(frozen=True)
class ShortKGemm:
    """A matrix product by `gemm/short_k.cu`.

    Attributes:
        lengths: batch, M, N and K.
        transposed: whether A and B are.
    """

    lengths: tuple[int, int, int, int]
    transposed: tuple[bool, bool]
    precision: str

    def suits(self) -> bool:
        """Whether the kernel can compute the product, and the result is large."""
        batch, m, n, k = self.lengths
        grid = max(batch, -(-m // ROWS)) <= MAX_GRID[1]
        return 0 < k <= MAX_K and n % WIDE == 0 and batch * m * n >= MIN_ELEMENTS and grid

    @property
    def cycles(self) -> float:
        """The estimate for `gemm/short_k.cu`."""
        batch, m, n, _ = self.lengths
        return START + batch * m * n * 4 / BYTES_PER_CYCLE

    def kernel(self) -> CudaKernel:
        batch, m, n, k = self.lengths
        launch = CudaLaunch(
            "gemm/short_k.cu",
            "short_k_gemm",
            (batch, m, n),
            (FLOAT32,),
            blocks=(-(-n // (THREADS * WIDE)), -(-m // ROWS), batch),
            threads=THREADS,
            definitions={
                **{f"TRANSPOSE_{x}": int(t) for x, t in zip("AB", self.transposed, strict=True)},
                "LENGTH_K": k,
                "THREADS": THREADS,
                "MIN_WIDE": WIDE,
                "WIDE_C": math.gcd(2 * WIDE if k <= MAX_WIDE_K else WIDE, n),
                "ROWS": ROWS,
                "MANTISSA": mantissa(self.precision),
            },
        )
        return CudaKernel((launch,), cycles=self.cycles)
