"""Round numbers for the axes of charts."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10

MOST_DECADES = 7
"""Powers of ten at a logarithmic axis, from which on every second one stands there, or fewer."""


def ticks(low: float, high: float, whole: bool = False) -> Sequence[float]:
    """A handful of round numbers at equal distances, the first and last of which enclose `low` and `high`.

    There are at least two, which are integers with `whole`.
    """
    if high - low <= 1e-6 * max(abs(low), abs(high)):
        low, high = min(low, 0.0), max(high, 0.0) or 1.0
    rough = (high - low) / 5
    power = 10.0 ** floor(log10(rough))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough * 0.999)
    if whole:
        step = max(1.0, step)
    first, last = floor(round(low / step, 6)), ceil(round(high / step, 6))
    return [float(f"{i * step:.9g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> Sequence[float]:
    """Powers of ten that enclose `low` and `high`, which are above 0; within two decades 1, 2 and 5 times those.

    1 is among them if it lies between their ends.
    """
    if high / low <= 100:
        numbers = [size * 10.0**k for k in range(floor(log10(low)) - 1, ceil(log10(high)) + 2) for size in (1, 2, 5)]
        first = max(i for i, x in enumerate(numbers) if x <= low * 1.001)
        last = min(i for i, x in enumerate(numbers) if x >= high * 0.999)
        return [float(f"{x:.9g}") for x in numbers[first : max(last, first + 1) + 1]]
    first, last = floor(log10(low)), ceil(log10(high))
    step = -(-(last - first) // MOST_DECADES)
    return [10.0**k for k in range(first // step * step, last + step, step)]
