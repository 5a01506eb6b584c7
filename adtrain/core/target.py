"""Target: the GPU that kernels are chosen for. It is a plain value, so no GPU is needed to choose them."""

from __future__ import annotations

from typing import NamedTuple


class Target(NamedTuple):
    """The properties of a GPU that kernel rules and passes depend on.

    Args:
        capability: compute capability, major and minor.
        multiprocessors: number of streaming multiprocessors.
        shared: maximum bytes of shared memory of a block (the opt-in limit).
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared: int


H200 = Target((9, 0), 132, 227 << 10)
