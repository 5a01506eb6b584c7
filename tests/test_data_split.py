from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from adtrain.data import DataError, Rows, Split, split
from adtrain.data.statistics import channel_statistics

indices = hnp.arrays(np.int64, st.integers(1, 9), elements=st.integers(0, 4))


@given(first=indices, data=st.data())
def test_taking_rows_twice_equals_indexing_twice(first: np.ndarray, data: st.DataObject) -> None:
    images, labels = np.arange(30).reshape(5, 1, 2, 3), np.arange(5)
    second = data.draw(hnp.arrays(np.int64, 4, elements=st.integers(0, len(first) - 1)))
    taken = Split(images, labels).take(first).take(second)
    expected = images[first][second]
    assert isinstance(taken.images, Rows)
    assert taken.images.base is images
    assert (taken.images.shape, taken.images.dtype, taken.images.nbytes) == (
        expected.shape,
        expected.dtype,
        expected.nbytes,
    )
    for key in (slice(1, 3), 2, np.array([[3, 0]])):
        np.testing.assert_array_equal(taken.images[key], expected[key])
    np.testing.assert_array_equal(taken.images, expected)
    np.testing.assert_array_equal(taken.labels, labels[first][second])


@given(
    hnp.arrays(
        st.sampled_from(["uint8", "float32"]),
        st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 3), st.just(2)),
        elements={"min_value": 0, "max_value": 200},
    ),
    st.integers(1, 100),
)
def test_statistics_in_chunks_equal_those_of_the_whole(images: np.ndarray, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split, "CHUNK_BYTES", chunk)
        mean, std = channel_statistics(images)
    whole = images.astype(np.float64) / (255 if images.dtype == np.uint8 else 1)
    np.testing.assert_allclose(mean, whole.mean(axis=(0, 2, 3)), rtol=1e-9, atol=1e-12)
    expected = whole.std(axis=(0, 2, 3))
    constant = expected <= 1e-6 * np.abs(whole.mean(axis=(0, 2, 3)))
    np.testing.assert_allclose(std, np.where(constant, 1.0, expected), rtol=1e-6)


def test_the_error_of_a_non_finite_number_names_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.zeros((5, 2, 1, 1), np.float32)
    images[3, 1] = np.nan
    monkeypatch.setattr(split, "CHUNK_BYTES", 16)
    with pytest.raises(DataError, match=r"x.npz: found a number that is not finite in row 3, expected finite ones"):
        channel_statistics(images, "x.npz")
