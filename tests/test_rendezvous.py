"""Ranks that meet over TCP, here as threads: on ports that other programs have, and exchanges of all lengths."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adtrain.core.errors import AdtrainError
from adtrain.distributed import communicators
from adtrain.distributed.communicators import TcpCommunicator
from adtrain.distributed.rendezvous import first_host, meeting

SECONDS = 20.0
Environment = dict[str, str]


@pytest.fixture
def taken() -> Iterator[Environment]:
    """The variables of a job whose MASTER_PORT another program has, which never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}


def free() -> Environment:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}


def joined(environment: Mapping[str, str], rank: int, size: int, timeout: float = SECONDS) -> TcpCommunicator:
    where = meeting(environment, size)
    assert where is not None
    return TcpCommunicator(where, rank, size, timeout)


def on_threads(size: int, function: Callable[[int], object]) -> list[object]:
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(function, range(size)))


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, list[TcpCommunicator]]]:
    """Jobs of 2 and 8 ranks."""
    with ExitStack() as stack:
        jobs: dict[int, list[TcpCommunicator]] = {}
        for size in (2, 8):
            environment = free()
            with ThreadPoolExecutor(size) as threads:
                jobs[size] = list(threads.map(lambda r, e=environment, n=size: joined(e, r, n), range(size)))
            for rank in jobs[size]:
                stack.callback(rank.close)
        yield jobs


@given(size=st.sampled_from([2, 8]), length=st.sampled_from([0, 1, 3, 1000, 300_000, 2_500_000]))
@settings(max_examples=12)
def test_exchanges_are_those_of_numpy(ranks: dict[int, list[TcpCommunicator]], size: int, length: int) -> None:
    length = length if size == 2 else length // 8
    sent = np.random.default_rng(length).integers(0, 256, (size, size, length), np.uint8)
    gathered, exchanged = np.empty((size, *sent.shape), np.uint8), np.empty_like(sent)

    def run(rank: int) -> None:
        ranks[size][rank].all_gather(sent[rank], gathered[rank])
        ranks[size][rank].all_to_all(sent[rank], exchanged[rank])

    on_threads(size, run)
    assert all((x == sent).all() for x in gathered)
    assert (exchanged == sent.swapaxes(0, 1)).all()


def test_ranks_of_a_host_share_memory(ranks: dict[int, list[TcpCommunicator]]) -> None:
    def run(rank: int) -> bytes:
        memory = ranks[8][rank].shared_memory(8)
        assert memory is not None
        memory[rank] = rank
        ranks[8][rank].all_gather(np.zeros(1), np.zeros(8))
        return memory.tobytes()

    assert all(rank.shares_memory for rank in ranks[8])
    assert on_threads(8, run) == [bytes(range(8))] * 8


@pytest.mark.parametrize("fails", ["create", "open"])
def test_all_ranks_know_if_one_cannot_share_memory(
    ranks: dict[int, list[TcpCommunicator]], fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no such system call, or the path of rank 0 leads to nothing, as on another host."""
    if fails == "create":
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(communicators, "_opened", lambda path, size, mark: None)
    assert on_threads(2, lambda rank: ranks[2][rank].shared_memory(8)) == [None, None]


@pytest.mark.parametrize("of_torchrun", [False, True])
def test_another_program_may_have_the_port(taken: Environment, of_torchrun: bool) -> None:
    """torchrun's store is left alone; what else listens there is recognised by its silence."""
    if of_torchrun:
        taken["TORCHELASTIC_USE_AGENT_STORE"] = "True"

    def run(rank: int) -> list[int]:
        with closing(joined(taken, rank, 2)) as found:
            receive = np.empty(2, np.int64)
            found.all_gather(np.array(rank), receive)
            return receive.tolist()

    assert on_threads(2, run) == [[0, 1]] * 2


def test_two_jobs_with_one_address_do_not_mix() -> None:
    environment = free()
    jobs = [{**environment, "TORCHELASTIC_RUN_ID": name} for name in "ab"]

    def run(i: int) -> list[int]:
        with closing(joined(jobs[i % 2], i // 2, 2)) as rank:
            receive = np.empty(2, np.int64)
            rank.all_gather(np.array(i % 2), receive)
            return receive.tolist()

    assert on_threads(4, run) == [[0, 0], [1, 1], [0, 0], [1, 1]]


def test_missing_ranks_are_named() -> None:
    environment = free()
    where = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    with pytest.raises(AdtrainError, match=rf"^rank 1, 2, 3 did not connect to rank 0 at {where} in time: start all"):
        joined(environment, 0, 4, 0.1)
    with pytest.raises(AdtrainError, match=rf"^rank 1 on .* cannot reach rank 0 at {where} or the ports after it: "):
        joined(environment, 1, 4, 0.1)
    with pytest.raises(AdtrainError, match=r"^found 3 ranks, expected a power of two: --ranks, or "):
        joined(environment, 0, 3)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu3", "gpu3"), ("gpu[03-05,9],login", "gpu03"), ("a,b[1-2]", "a"), ("r1[7]n", "r17n"), ("n[2,5-9]", "n2")],
)
def test_the_first_host_of_slurm(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
    found = meeting({"SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "1"}, 4)
    assert found is not None
    assert found.address == first


def test_without_variables_there_is_no_meeting() -> None:
    assert meeting({"SLURM_JOB_ID": "77"}, 4) is None
    with pytest.raises(AdtrainError, match=r"^found MASTER_PORT='x' in the environment, expected a port"):
        meeting({"MASTER_ADDR": "a", "MASTER_PORT": "x"}, 2)
