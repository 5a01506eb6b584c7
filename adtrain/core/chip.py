"""The GPU that kernels are chosen for, as far as the choice needs to know it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(unsafe_hash=True)
class Chip:
    """What the rule needs to know of the GPU."""

    multiprocessors: int = 132
    capability: tuple[int, int] = (9, 0)
    shared: int = 227 << 10


CHIP = Chip()
"""The GPU that kernels are chosen for: an H200, unless the backend has found another one and said so here."""
