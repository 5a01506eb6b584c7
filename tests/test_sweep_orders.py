"""Processes that shuffle the examples of the members of a sweep."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest

from adtrain import data
from adtrain.sweeps import members
from adtrain.sweeps.members import ShufflePool


@pytest.fixture
def pool() -> Iterator[ShufflePool]:
    made = ShufflePool()
    yield made
    made.threads.shutdown()
    made.close()


def test_other_processes_compute_the_order_of_batches(pool: ShufflePool) -> None:
    rows = np.arange(100, 400)
    found = {(seed, epoch): pool.submit(rows, seed, epoch) for seed in (0, 2**63, 7) for epoch in (1, 2)}
    for (seed, epoch), order in found.items():
        np.testing.assert_array_equal(order.result(), rows[np.concatenate([*data.batches(300, 64, seed, epoch)])])
    assert pool.idle


@pytest.mark.parametrize("command", ["import sys; sys.exit(1)", "print('short', flush=True)"])
def test_if_the_process_fails_this_one_computes_the_order(
    pool: ShufflePool, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "PROGRAM", command)
    found = pool.submit(np.arange(50), 3, 1).result()
    np.testing.assert_array_equal(found, next(data.batches(50, 50, 3, 1)))
    assert not pool.idle


def test_if_no_process_starts_this_one_computes_the_order(pool: ShufflePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/missing")
    found = pool.submit(np.arange(50), 3, 1).result()
    np.testing.assert_array_equal(found, next(data.batches(50, 50, 3, 1)))
