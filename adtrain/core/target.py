"""Target: the GPU that kernels are chosen for. It is a plain value, so no GPU is needed to choose them."""

from __future__ import annotations

from typing import NamedTuple

WARP = 32
"""Threads of a warp."""
TENSOR_CORES = (8, 0)
"""The first compute capability with asynchronous copies, and with tensor cores for tf32, bfloat16 and float64."""
HOPPER = (9, 0)
"""The only compute capability with wgmma, and the first one with clusters."""


class Target(NamedTuple):
    """The properties of a GPU that kernel rules and passes depend on.

    Args:
        capability: compute capability, major and minor.
        multiprocessors: number of streaming multiprocessors.
        shared: maximum bytes of shared memory of a block (the opt-in limit).
        by_member: whether kernels are chosen for a Program by member. Some get arrays with an axis of members. The
            choice must not depend on their number, so that a member has the same bits among any others.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared: int
    by_member: bool = False
