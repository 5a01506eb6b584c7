"""Percentiles of a few numbers. NumPy imports masked arrays for them, which takes as long as a short training."""

from __future__ import annotations

from collections.abc import Sequence


def percentiles(numbers: Sequence[float], percents: Sequence[float]) -> list[float]:
    """As `numpy.percentile`, to the bit: between two neighbours by linear interpolation."""
    ordered = sorted(numbers)
    found = []
    for percent in percents:
        place = percent / 100 * (len(ordered) - 1)
        low = ordered[int(place)]
        high = ordered[min(int(place) + 1, len(ordered) - 1)]
        part, step = place - int(place), high - low
        found.append(low + step * part if part < 0.5 else high - step * (1 - part))
    return found
