"""Statistics of samples from an unknown distribution: order statistics, and no sample removed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import comb

from adtrain.percentiles import percentiles

CONFIDENCE = 0.95

MIN_COUNT = 6
"""With fewer samples, not even minimum and maximum enclose the median with CONFIDENCE: 1 - 2 / 2**5 < 0.95."""

FENCE = 1.5
"""A sample further than this many interquartile ranges from the quartiles is an outlier."""


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """A confidence interval of the median with at least CONFIDENCE, for any distribution.

    The number of samples below the median has the binomial distribution B(n, 1/2). The k-th smallest and the k-th
    largest sample therefore enclose it with probability 1 - 2 P(B < k), and k is the largest with enough confidence
    (H. A. David and H. N. Nagaraja, Order Statistics, 3rd ed., section 7.1).

    Raises:
        ValueError: there are fewer than MIN_COUNT samples.
    """
    if len(samples) < MIN_COUNT:
        raise ValueError(f"median_interval: found {len(samples)} samples, expected at least {MIN_COUNT}")
    ordered, k = sorted(samples), rank(len(samples))
    return ordered[k - 1], ordered[-k]


@cache
def rank(count: int) -> int:
    """The k of `median_interval`, for `count` samples."""
    k, below = 0, 0.0
    while (below := below + comb(count, k) / 2**count) <= (1 - CONFIDENCE) / 2:
        k += 1
    return k


def outliers(samples: Sequence[float]) -> tuple[float, ...]:
    """The samples more than FENCE interquartile ranges from the quartiles, in their order (J. W. Tukey, Exploratory
    Data Analysis, 1977)."""
    low, high = percentiles(samples, [25, 75])
    reach = FENCE * (high - low)
    return tuple(x for x in samples if x < low - reach or x > high + reach)
