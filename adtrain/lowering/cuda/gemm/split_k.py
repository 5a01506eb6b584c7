"""The launch that adds up the parts of a product whose K is cut (`kernels/cuda/gemm/split_k_sum.cu`)."""

from __future__ import annotations

from adtrain.core.kernel import LegacyKernel

THREADS = 256
"""Of a block."""
TEAMS, FEW, MANY = 8, 1 << 16, 16
"""Threads that share an element of at most FEW, with MANY parts or more."""


def sum_splits(size: int, m: int, n: int, parts: int) -> LegacyKernel:
    """The sum of ``parts`` of ``size`` elements, those of matrices of m x n."""
    teams = TEAMS if size <= FEW and parts >= MANY else 1
    return LegacyKernel(
        "gemm/split_k_sum.cu",
        "sum_splits",
        lambda *_, **__: (size, m, n, parts),
        blocks=lambda *_, **__: -(-size * teams // THREADS),
        threads=lambda *_, **__: THREADS,
        definitions=lambda *_, **__: {"TEAMS": teams},
    )
