from __future__ import annotations

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adtrain.bench.timing.statistics import CONFIDENCE, FEWEST, median_interval, outliers, rank

SAMPLES = st.lists(st.floats(1e-6, 1e6), min_size=FEWEST, max_size=60)


def coverage(count: int, k: int) -> float:
    """The probability that the k-th least and the k-th greatest of so many samples enclose the median."""
    return 1 - 2 * sum(comb(count, i) for i in range(k)) / 2**count


@given(st.integers(FEWEST, 200))
def test_the_ranks_are_the_nearest_to_the_middle_that_are_sure_enough(count: int) -> None:
    assert coverage(count, rank(count)) >= CONFIDENCE > coverage(count, rank(count) + 1)


def test_the_ranks_are_those_of_the_published_tables() -> None:
    """David and Nagaraja, and any table of confidence intervals for the median at 95%."""
    assert {n: rank(n) for n in (6, 8, 9, 10, 15, 20, 25, 31, 50)} == {
        6: 1, 8: 1, 9: 2, 10: 2, 15: 4, 20: 6, 25: 8, 31: 10, 50: 18,
    }  # fmt: skip


@pytest.mark.parametrize("skewed", [False, True])
def test_the_interval_holds_the_median_as_often_as_it_says(skewed: bool) -> None:
    rng, held, trials = np.random.default_rng(0), 0, 4000
    for _ in range(trials):
        samples = rng.exponential(size=15) if skewed else rng.normal(np.log(2), size=15)
        low, high = median_interval(samples.tolist())
        held += low <= np.log(2) <= high  # the median of both
    assert coverage(15, rank(15)) == pytest.approx(held / trials, abs=0.015)


@given(SAMPLES)
def test_the_interval_is_made_of_samples_around_the_median_in_any_order(samples: list[float]) -> None:
    low, high = median_interval(samples)
    assert {low, high} <= set(samples)
    assert low <= np.median(samples) <= high
    assert median_interval(sorted(samples, reverse=True)) == (low, high)


def test_too_few_samples_have_no_interval() -> None:
    with pytest.raises(ValueError, match="found 5 samples, expected at least 6"):
        median_interval([1.0] * 5)


def test_outliers_are_those_beyond_the_fences_in_their_order() -> None:
    assert outliers([1, 2, 3, 4, 5, 6, 7, 8, 30, -20]) == (30, -20)
    assert outliers([2.0] * 9 + [2.1]) == (2.1,)


@given(SAMPLES, st.floats(0.1, 10))
def test_outliers_do_not_depend_on_the_unit(samples: list[float], factor: float) -> None:
    spread = np.subtract(*np.percentile(samples, [75, 25]))
    if spread > 1e-6 * max(samples):  # else it is rounding that decides
        near = [abs(abs(x - q) - 1.5 * spread) for x in samples for q in np.percentile(samples, [25, 75])]
        if min(near) > 1e-9 * max(samples):
            assert len(outliers([x * factor for x in samples])) == len(outliers(samples))
