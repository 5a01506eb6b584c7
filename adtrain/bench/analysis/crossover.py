"""From which size on one device is faster than another, read off times at a few sizes."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import NamedTuple


class Crossover(NamedTuple):
    """Where the second device wins: "always" or "never" among the sizes measured, "from" or "up to" the size `at`."""

    wins: str
    at: float | None = None

    def __str__(self) -> str:
        return self.wins if self.at is None else f"{self.wins} {self.at:,.0f}"


def crossover(sizes: Sequence[float], speedups: Sequence[float]) -> Crossover:
    """The size from which on the speed-up is at least 1 up to the largest; or beyond which it is nowhere.

    Between two sizes the logarithm of the speed-up is taken to be linear in the logarithm of the size, as it is for
    times that are powers of it.

    Args:
        sizes: ascending, above 0.
        speedups: the first device's time over the second's at each.
    """
    faster = [speedup >= 1 for speedup in speedups]
    wins = faster[-1]
    if all(faster) or not any(faster):
        return Crossover("always" if wins else "never")
    last = max(i for i, each in enumerate(faster) if each is not wins)
    x0, x1, y0, y1 = (log(x) for x in (*sizes[last : last + 2], *speedups[last : last + 2]))
    return Crossover("from" if wins else "up to", exp(x0 - y0 * (x1 - x0) / (y1 - y0)))
