"""Round numbers for the axes of charts."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10

SMALLEST = 1e-300
"""Numbers below this magnitude are drawn as 0."""

MOST_DECADES = 7
"""A logarithmic axis over more powers of ten than this has a tick at every second one, or at fewer."""


def ticks(low: float, high: float, whole: bool = False) -> Sequence[float]:
    """At least two equidistant round numbers from at most `low` to at least `high`; integers with `whole`."""
    if max(abs(low), abs(high)) < SMALLEST:
        low = high = 0.0
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
    """Powers of ten from at most `low` to at least `high`, both above 0; up to two decades also 2 and 5 times those.

    If 1 lies in this range, it is one of the ticks.
    """
    if high / low <= 100:
        numbers = [size * 10.0**k for k in range(floor(log10(low)) - 1, ceil(log10(high)) + 2) for size in (1, 2, 5)]
        first = max(i for i, x in enumerate(numbers) if x <= low * 1.001)
        last = min(i for i, x in enumerate(numbers) if x >= high * 0.999)
        return [float(f"{x:.9g}") for x in numbers[first : max(last, first + 1) + 1]]
    first, last = floor(log10(low)), ceil(log10(high))
    step = -(-(last - first) // MOST_DECADES)
    return [10.0**k for k in range(first // step * step, last + step, step)]
