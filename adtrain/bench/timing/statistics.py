"""What can be said of samples of an unknown distribution: order statistics only, and no sample left out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import comb

import numpy as np

CONFIDENCE = 0.95

FEWEST = 6
"""Of fewer samples not even the least and the greatest enclose the median with CONFIDENCE: 1 - 2 / 2**5 < 0.95."""

FENCE = 1.5
"""Interquartile ranges beyond the quartiles from which on a sample is an outlier."""


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """A confidence interval of the median, of at least CONFIDENCE whatever the distribution.

    The number of samples below the median has the binomial distribution B(n, 1/2), so that the k-th least and the k-th
    greatest enclose it with probability 1 - 2 P(B < k); k is the greatest for which that is enough (H. A. David and
    H. N. Nagaraja, Order Statistics, 3rd ed., section 7.1).

    Raises:
        ValueError: there are fewer than FEWEST samples.
    """
    if len(samples) < FEWEST:
        raise ValueError(f"median_interval: found {len(samples)} samples, expected at least {FEWEST}")
    ordered, k = sorted(samples), rank(len(samples))
    return ordered[k - 1], ordered[-k]


@cache
def rank(count: int) -> int:
    """The k of `median_interval`, for so many samples."""
    k, below = 0, 0.0
    while (below := below + comb(count, k) / 2**count) <= (1 - CONFIDENCE) / 2:
        k += 1
    return k


def outliers(samples: Sequence[float]) -> tuple[float, ...]:
    """The samples more than FENCE interquartile ranges outside the quartiles, in their order (J. W. Tukey, Exploratory
    Data Analysis, 1977)."""
    low, high = np.percentile(samples, [25, 75]).tolist()
    reach = FENCE * (high - low)
    return tuple(x for x in samples if x < low - reach or x > high + reach)
