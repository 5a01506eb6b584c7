from __future__ import annotations

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adtrain.bench.sampling import CONFIDENCE, MIN_COUNT, median_interval, outliers, rank
from adtrain.metrics import percentiles

SAMPLES = st.lists(st.floats(1e-6, 1e6), min_size=MIN_COUNT, max_size=60)


def coverage(count: int, k: int) -> float:
    """The probability that the k-th smallest and the k-th largest of `count` samples enclose the median."""
    return 1 - 2 * sum(comb(count, i) for i in range(k)) / 2**count


@given(st.integers(MIN_COUNT, 200))
def test_rank_is_the_largest_with_enough_confidence(count: int) -> None:
    assert coverage(count, rank(count)) >= CONFIDENCE > coverage(count, rank(count) + 1)


@given(SAMPLES, st.lists(st.integers(0, 100), max_size=3))
def test_percentiles_equal_those_of_numpy(samples: list[float], percents: list[int]) -> None:
    assert percentiles(samples, percents) == [float(np.percentile(samples, x)) for x in percents]


def test_ranks_equal_published_tables() -> None:
    """Tables of 95% confidence intervals for the median, as in David and Nagaraja."""
    assert {n: rank(n) for n in (6, 8, 9, 10, 15, 20, 25, 31, 50)} == {
        6: 1, 8: 1, 9: 2, 10: 2, 15: 4, 20: 6, 25: 8, 31: 10, 50: 18,
    }  # fmt: skip


@pytest.mark.parametrize("skewed", [False, True])
def test_interval_covers_the_median_with_its_confidence(skewed: bool) -> None:
    rng, covered, trials = np.random.default_rng(0), 0, 4000
    for _ in range(trials):
        samples = rng.exponential(size=15) if skewed else rng.normal(np.log(2), size=15)
        low, high = median_interval(samples.tolist())
        covered += low <= np.log(2) <= high  # the median of both distributions
    assert coverage(15, rank(15)) == pytest.approx(covered / trials, abs=0.015)


@given(SAMPLES)
def test_interval_ends_are_samples_around_the_median_in_any_order(samples: list[float]) -> None:
    low, high = median_interval(samples)
    assert {low, high} <= set(samples)
    assert low <= np.median(samples) <= high
    assert median_interval(sorted(samples, reverse=True)) == (low, high)


def test_too_few_samples_are_an_error() -> None:
    with pytest.raises(ValueError, match="found 5 samples, expected at least 6"):
        median_interval([1.0] * 5)


def test_outliers_are_beyond_the_fences_and_keep_their_order() -> None:
    assert outliers([1, 2, 3, 4, 5, 6, 7, 8, 30, -20]) == (30, -20)
    assert outliers([2.0] * 9 + [2.1]) == (2.1,)


@given(SAMPLES, st.floats(0.1, 10))
def test_outliers_do_not_depend_on_the_unit(samples: list[float], factor: float) -> None:
    spread = np.subtract(*np.percentile(samples, [75, 25]))
    if spread > 1e-6 * max(samples):  # otherwise rounding decides
        near = [abs(abs(x - q) - 1.5 * spread) for x in samples for q in np.percentile(samples, [25, 75])]
        if min(near) > 1e-9 * max(samples):
            assert len(outliers([x * factor for x in samples])) == len(outliers(samples))
