"""Exchanges by copy engines, emulated in host memory: a thread for each rank takes its steps."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest
from thread_ranks import ThreadRank, on_ranks

from adtrain.backends.cuda.peer_window import Copy, Step, Write, own_copy, steps, window_bytes

EXCHANGES = 20
SIZE = 3000
SECONDS = 20


def take(step: Step) -> None:
    """Do what the driver does in a step."""
    if isinstance(step, Copy):
        ctypes.memmove(*step)
    elif isinstance(step, Write):
        ctypes.c_uint32.from_address(step.address).value = step.value
    else:
        end = time.monotonic() + SECONDS
        while ctypes.c_uint32.from_address(step.address).value != 1:
            assert time.monotonic() < end
            time.sleep(0)


def data(rank: int, number: int, ranks: int) -> np.ndarray:
    """What a rank sends in an exchange."""
    return np.random.default_rng((rank, number)).integers(0, 256, (ranks, SIZE), np.uint8)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_receives_what_the_others_send_in_many_exchanges(ranks: int) -> None:
    """Ranks are delayed at random. Each overwrites what it has sent directly after an exchange."""
    windows = [np.zeros(window_bytes(ranks), np.uint8) for _ in range(ranks)]
    sent = [np.zeros((ranks, SIZE), np.uint8) for _ in range(ranks)]

    def exchange(rank: ThreadRank) -> None:
        random = np.random.default_rng(rank.rank)
        for number in range(EXCHANGES):
            sent[rank.rank][:] = data(rank.rank, number, ranks)
            name = ("all_gather", "all_to_all")[number % 2]
            row = 0 if name == "all_gather" else rank.rank
            received = np.zeros((ranks, SIZE), np.uint8)
            given = [x.ctypes.data for x in sent], received.ctypes.data, SIZE, [x.ctypes.data for x in windows]
            own = own_copy(name, given[0][rank.rank], *given[1:3], rank.rank)
            for step in (own, *steps(name, *given, rank.rank)):
                time.sleep(random.choice([0, 0, 1e-3]))
                take(step)
            sent[rank.rank][:] = 0
            for peer in range(ranks):
                np.testing.assert_array_equal(received[peer], data(peer, number, ranks)[row])

    on_ranks(ranks, exchange)
