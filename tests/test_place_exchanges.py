"""Exchanges in memory that ranks share: the values of exchanges that copy, whatever rank is late, and few copies."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
from thread_ranks import ThreadRank, on_ranks
from training_runs import write_config

import adtrain as ad
from adtrain import config, ops
from adtrain.backends.cpu.compiled_program import RankMemory
from adtrain.core import communicator
from adtrain.core.primitive import Trait
from adtrain.core.staging import stage
from adtrain.core.views import subview
from adtrain.ops.collectives import tree_sum
from adtrain.passes import ALL, fold_collectives, optimize_regions, place_collectives, place_views
from adtrain.passes.plan_memory import plan_memory
from adtrain.training.preparation import outline

RANKS = 2
LENGTH = 32
"""Elements of a rank's part, float32: two cache lines."""
PASSES = (*ALL, place_collectives, place_views)


def updated(x: Any, read_late: bool = False) -> Any:
    """New parameters, as a step computes them: each rank adds to its part of ``x`` what all ranks have computed for it.

    With `read_late`, a rank needs all old parameters after that exchange, when others may already have new ones.
    """
    rank = communicator.current().rank
    sent = ops.reshape(ops.concatenate([ops.sin(x), ops.flip(x)]), (RANKS, -1))
    received = tree_sum(ops.all_to_all(sent[:, :LENGTH]))
    if read_late:
        received = received + ops.sum(ops.cos(x) * ops.sum(received))
    new = subview(x, rank * LENGTH, (LENGTH,)) * 0.5 + received
    return ops.reshape(ops.all_gather(new), (-1,))


def rows(x: Any) -> Any:
    return ops.reshape(x, (RANKS, -1))


def vector(x: Any) -> Any:
    return ops.reshape(x, (-1,))


def gathered_twice(x: Any) -> Any:
    y = ops.sin(x)
    return ops.all_gather(y)[1] - ops.all_gather(y)[0] + y


def unaligned(x: Any) -> Any:
    """Exchanges of parts of a cache line, and of nothing."""
    sent = ops.sin(x[:6]), ops.cos(rows(x[:4])), x[:0]
    received = ops.all_gather(sent[0]), tree_sum(ops.all_to_all(sent[1])), ops.all_gather(sent[2])
    return x * 0.5 + ops.sum(received[0]) * received[1][0] + ops.sum(received[2])


def joined(x: Any) -> Any:
    """Received values that `place_views` puts behind one another."""
    received = vector(ops.all_gather(ops.sin(x))), vector(ops.all_to_all(ops.cos(rows(x))))
    return ops.flip(ops.concatenate([*received, ops.exp(-x)]))[LENGTH : 3 * LENGTH]


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "parameters": updated,
    "parameters that are read late": partial(updated, read_late=True),
    "arguments and results": lambda x: vector(ops.all_to_all(rows(x))),
    "rows that are read together": lambda x: ops.flip(vector(ops.all_to_all(ops.exp(-rows(x))))),
    "one exchange after another": lambda x: vector(ops.all_gather(ops.all_to_all(ops.sin(rows(x)))[1])),
    "parts of a cache line": unaligned,
    "the same twice": gathered_twice,
    "parts of a concatenation": joined,
}


def numbers(seed: int) -> ad.Array:
    return ad.array(np.random.default_rng(seed).normal(size=RANKS * LENGTH).astype(np.float32))


@pytest.mark.compiled
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.exhaustive if i % 2 else ()) for i, x in enumerate(reversed(FUNCTIONS))]
)
def test_values_are_those_of_exchanges_that_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are late by random times, before and after each barrier."""
    barrier = RankMemory.barrier

    def late(self: RankMemory) -> None:
        delays = random.Random(f"{self.ranks.rank} {self.barriers}")
        sleep(delays.choice([0, 0, 0.003]))
        barrier(self)
        sleep(delays.choice([0, 0, 0.003]))

    monkeypatch.setattr(RankMemory, "barrier", late)

    def run(rank: ThreadRank) -> np.ndarray:
        staged, other = (stage(FUNCTIONS[name], PASSES, donate=(0,)) for _ in range(2))
        found = [staged.repeat(times, numbers(times)) for times in (5, 1, 1, 1)]
        x = other.repeat(2, ad.array(found[0].numpy()))
        return np.stack([x.numpy() for x in (*found, staged.repeat(3, staged(x)))])

    for found, expected in zip(on_ranks(RANKS, run, shares_memory=True), on_ranks(RANKS, run), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("name", "inputs"), [("parameters", 1), ("parameters that are read late", 0)])
def test_parameters_stay_in_their_slot_if_nothing_reads_the_old_ones_late(name: str, inputs: int) -> None:
    def in_slots(rank: ThreadRank) -> int:
        slots = plan_memory(stage(FUNCTIONS[name], PASSES, donate=(0,)).program(numbers(0)), ranks=rank).slots
        assert slots is not None
        return len(slots.inputs)

    assert on_ranks(RANKS, in_slots) == [inputs] * RANKS


@pytest.mark.parametrize("settings", [[], ["training.clip_norm=1.0"]], ids=["", "clipping"])
def test_a_training_step_copies_no_gradients_and_no_parameters(tmp_path: Path, settings: list[str]) -> None:
    cfg = config.load(write_config(tmp_path), ["data.shards=2", *settings])
    passes = (fold_collectives, partial(optimize_regions, passes=ALL), place_collectives, place_views)

    def check(rank: ThreadRank) -> tuple[dict[int, int], int]:
        program = outline(cfg).step_program(passes=passes)
        plan = plan_memory(program, ranks=rank)
        assert plan.slots is not None
        for e in program.equations:
            if e.has(Trait.COLLECTIVE) and e.inputs[0].size > LENGTH:
                places = [plan.places[v] for v in (*e.inputs, *e.outputs)]
                assert all(x.where == "shared" or x.at in plan.slots.inputs for x in places), places
        return plan.slots.starts, len(plan.slots.inputs)

    first, second = on_ranks(RANKS, check)
    assert first == second
    assert first[1] == 1
