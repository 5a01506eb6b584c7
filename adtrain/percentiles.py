"""Percentiles of a few numbers, without `numpy.percentile`, whose imports take as long as a short training."""

from __future__ import annotations

from collections.abc import Sequence


def percentiles(numbers: Sequence[float], percents: Sequence[float]) -> list[float]:
    """The values of `numpy.percentile` with linear interpolation, with the same bits. `percents` are in [0, 100]."""
    ordered = sorted(numbers)
    results = []
    for percent in percents:
        index = percent / 100 * (len(ordered) - 1)
        low = ordered[int(index)]
        high = ordered[min(int(index) + 1, len(ordered) - 1)]
        fraction, step = index - int(index), high - low
        results.append(low + step * fraction if fraction < 0.5 else high - step * (1 - fraction))
    return results
