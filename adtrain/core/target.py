"""Target: the GPU that kernels are chosen for. It needs no driver, so plans for any GPU can be made anywhere."""

from __future__ import annotations

from typing import NamedTuple


class Target(NamedTuple):
    """A GPU as kernel rules and passes see it.

    Args:
        capability: compute capability, major and minor.
        multiprocessors: number of streaming multiprocessors.
        shared: most bytes of shared memory that a block can have (opt-in).
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared: int


H200 = Target((9, 0), 132, 227 << 10)
