"""The size at which one device becomes faster than another, interpolated between measured sizes."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import NamedTuple


class Crossover(NamedTuple):
    """Where the second device is faster: "always" or "never" at the measured sizes, "from" or "up to" the size `at`."""

    wins: str
    at: float | None = None

    def __str__(self) -> str:
        return self.wins if self.at is None else f"{self.wins} {self.at:,.0f}"


def crossover(sizes: Sequence[float], speedups: Sequence[float]) -> Crossover:
    """The size from which the speed-up is at least 1 up to the largest size, or from which it is below 1.

    The logarithm of the speed-up is interpolated linearly in the logarithm of the size, which is exact where times are
    powers of the size.

    Args:
        sizes: ascending, above 0.
        speedups: at each size, the first device's time over the second's.
    """
    faster = [speedup >= 1 for speedup in speedups]
    wins = faster[-1]
    if all(faster) or not any(faster):
        return Crossover("always" if wins else "never")
    last = max(i for i, each in enumerate(faster) if each is not wins)
    x0, x1, y0, y1 = (log(x) for x in (*sizes[last : last + 2], *speedups[last : last + 2]))
    return Crossover("from" if wins else "up to", exp(x0 - y0 * (x1 - x0) / (y1 - y0)))
