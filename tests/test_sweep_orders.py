"""Orders that other processes compute for the members of a sweep."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest

from adtrain import data
from adtrain.sweeps import orders
from adtrain.sweeps.orders import Orders


@pytest.fixture
def computed() -> Iterator[Orders]:
    found = Orders()
    yield found
    found.threads.shutdown()
    found.close()


def test_other_processes_find_the_order_of_batches(computed: Orders) -> None:
    rows = np.arange(100, 400)
    found = {(seed, epoch): computed.submit(rows, seed, epoch) for seed in (0, 2**63, 7) for epoch in (1, 2)}
    for (seed, epoch), order in found.items():
        np.testing.assert_array_equal(order.result(), rows[np.concatenate([*data.batches(300, 64, seed, epoch)])])
    assert computed.idle


@pytest.mark.parametrize("command", ["import sys; sys.exit(1)", "print('short', flush=True)"])
def test_a_process_that_fails_leaves_its_order_to_this_one(
    computed: Orders, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "RUN", command)
    found = computed.submit(np.arange(50), 3, 1).result()
    np.testing.assert_array_equal(found, next(data.batches(50, 50, 3, 1)))
    assert not computed.idle


def test_without_another_process_this_one_computes_an_order(computed: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/missing")
    found = computed.submit(np.arange(50), 3, 1).result()
    np.testing.assert_array_equal(found, next(data.batches(50, 50, 3, 1)))
