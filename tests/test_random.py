"""Philox: the published numbers, the same mask everywhere, and dropout's statistics."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

import adtrain as ad
from adtrain import ops
from adtrain.ops.create import philox

# Known answers of the Random123 library for philox4x32-10: counter, key, output.
KNOWN = [
    ([0] * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_published_numbers(counter: Any, key: Any, words: Any) -> None:
    assert " ".join(f"{int(word):08x}" for word in philox(counter, key)) == words


def test_a_number_depends_on_seed_step_stream_and_position_only() -> None:
    def draw(
        seed: int = 1, step: int = 2, shape: tuple[int, ...] = (1000,), stream: int = 3, dtype: str = "float32"
    ) -> np.ndarray:
        return ops.random_uniform(ops.rng_state(seed, step), shape, stream, dtype).numpy()

    base = draw()
    assert np.array_equal(base, draw())
    assert np.array_equal(base, draw(dtype="float64"))
    assert np.array_equal(base[:37], draw(shape=(37,)))
    assert np.array_equal(base.reshape(10, 100), draw(shape=(10, 100)))
    for other in (draw(seed=2), draw(seed=1 + 2**32), draw(step=3), draw(step=2 + 2**32), draw(stream=4)):
        assert np.mean(base == other) < 0.01


def test_the_numbers_are_uniform() -> None:
    x = ops.random_uniform(ops.rng_state(5), (100_000,), dtype="float64").numpy()
    assert x.min() >= 0
    assert x.max() < 1
    counts, _ = np.histogram(x, 20, (0, 1))
    chi_square = ((counts - 5000) ** 2 / 5000).sum()
    assert chi_square < 43.8  # 99.9% quantile for 19 degrees of freedom


def test_random_normal_follows_the_uniform_numbers_of_its_stream() -> None:
    uniform = ops.random_uniform(ops.rng_state(5), (1000,), 2, "float64").numpy() + 2.0**-25
    found = ops.random_normal(ops.rng_state(5), (1000,), 2, "float64").numpy()
    np.testing.assert_allclose(found, [NormalDist().inv_cdf(u) for u in uniform], rtol=2e-7)


@pytest.mark.parametrize("draw", [ops.random_uniform, ops.random_normal])
@pytest.mark.parametrize("stream", [-1, 2**32])
def test_a_stream_out_of_range_is_refused(draw: Any, stream: int) -> None:
    expected = rf"^{draw.__name__}: stream is {stream}, expected an integer in \[0, 2\^32\)$"
    with pytest.raises(ad.OptionError, match=expected):
        draw(ops.rng_state(0), (2,), stream)


def test_dropout_preserves_the_mean_and_masks_the_gradient() -> None:
    x = np.ones(50_000)
    out, pullback = ad.vjp(lambda x: ops.dropout(x, 0.3, ops.rng_state(0)), x)
    kept = out.numpy() > 0
    assert kept.mean() == pytest.approx(0.7, abs=0.01)
    np.testing.assert_allclose(out.numpy()[kept], 1 / 0.7)
    np.testing.assert_allclose(pullback(x)[0].numpy(), kept / 0.7)
    assert ops.dropout(ad.array(x), 0.0, ops.rng_state(0)).numpy().all()
