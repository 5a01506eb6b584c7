from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adtrain.bench.devices import crossover

SIZES = st.lists(st.integers(1, 10**9), min_size=2, max_size=8, unique=True).map(sorted)
POSITIVE = st.floats(1e-3, 1e3)


@given(SIZES, POSITIVE, POSITIVE, st.floats(0.1, 3))
def test_crossover_is_exact_for_power_laws(sizes: list[int], overhead: float, rate: float, power: float) -> None:
    """The CPU takes rate * n**power, the GPU takes `overhead` at every size."""
    speedups = [rate * n**power / overhead for n in sizes]
    exact = (overhead / rate) ** (1 / power)
    found = crossover(sizes, speedups)
    if min(speedups) >= 1:
        assert (found.wins, found.at) == ("always", None)
    elif max(speedups) < 1:
        assert (found.wins, found.at) == ("never", None)
    else:
        assert found.at == pytest.approx(exact, rel=1e-6)


@given(SIZES, st.data())
def test_crossover_follows_the_last_size_that_differs_from_the_largest(sizes: list[int], data: st.DataObject) -> None:
    speedups = data.draw(st.lists(POSITIVE, min_size=len(sizes), max_size=len(sizes)))
    found = crossover(sizes, speedups)
    if found.at is not None:
        wins = speedups[-1] >= 1
        last = max(i for i, speedup in enumerate(speedups) if (speedup >= 1) != wins)
        assert sizes[last] * (1 - 1e-9) <= found.at <= sizes[last + 1] * (1 + 1e-9)
        assert found.wins == ("from" if wins else "up to")
    else:
        assert found.wins == ("always" if min(speedups) >= 1 else "never")


def test_crossover_as_text() -> None:
    speedups = [1, 2], [0.3, 0.9], [0.1, 10], [10, 0.1]
    assert [crossover([10, 1000], x).says for x in speedups] == ["always", "never", "from 100", "up to 100"]
