from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adtrain import data


def numbered(labels: np.ndarray) -> data.Split:
    """A split of one-pixel images that hold their own index."""
    images = np.arange(len(labels), dtype=np.uint8).reshape(-1, 1, 1, 1)
    return data.Split(images, labels.astype(np.int64))


@given(st.integers(0, 300), st.integers(1, 70), st.integers(0, 2**63), st.integers(0, 50))
def test_the_batches_of_an_epoch_are_a_permutation(count: int, batch_size: int, seed: int, epoch: int) -> None:
    found = list(data.batches(count, batch_size, seed, epoch))
    assert all(len(batch) == batch_size for batch in found[:-1])
    assert all(batch.dtype == np.int64 for batch in found)
    assert sorted(np.concatenate([np.empty(0, np.int64), *found])) == list(range(count))


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    orders = {key: np.concatenate(list(data.batches(100, 7, *key))) for key in [(0, 0), (0, 1), (1, 0), (2**32, 0)]}
    for key, order in orders.items():
        np.testing.assert_array_equal(order, np.concatenate(list(data.batches(100, 100, *key))))
    assert len({tuple(order) for order in orders.values()}) == len(orders)


def test_a_batch_size_below_one_is_refused_before_iterating() -> None:
    with pytest.raises(data.DataError, match="batch size: found 0, expected at least 1"):
        data.batches(10, 0, seed=0, epoch=0)


@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=120).map(np.array),
    st.floats(0.01, 0.99),
    st.integers(0, 2**32),
)
def test_a_validation_split_is_stratified_by_class(labels: np.ndarray, fraction: float, seed: int) -> None:
    total = round(fraction * len(labels))
    if not 0 < total < len(labels):
        with pytest.raises(data.DataError, match="expected at least 1 of each"):
            data.split_validation(numbered(labels), fraction, seed)
        return
    train, validation = data.split_validation(numbered(labels), fraction, seed)
    assert validation is not None
    assert len(validation) == total
    trained, held_out = (np.asarray(part.images, int).ravel() for part in (train, validation))
    assert sorted([*trained, *held_out]) == list(range(len(labels)))
    for part, indices in ((train, trained), (validation, held_out)):
        np.testing.assert_array_equal(part.labels, labels[indices])
        assert np.all(np.diff(indices) > 0)
    share = np.bincount(validation.labels, minlength=5) - fraction * np.bincount(labels, minlength=5)
    assert np.all(np.abs(share) < 1)


def test_a_split_depends_on_its_seed() -> None:
    split = numbered(np.arange(200) % 2)
    first, again, other = (data.split_validation(split, 0.2, seed)[0].images for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_validation_fraction_of_zero_returns_the_split_itself() -> None:
    split = numbered(np.arange(5))
    assert data.split_validation(split, 0.0, seed=0) == (split, None)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_fraction_outside_its_range_is_refused(fraction: float) -> None:
    with pytest.raises(data.DataError, match=r"validation fraction: found .*, expected at least 0 and below 1"):
        data.split_validation(numbered(np.arange(5)), fraction, seed=0)
