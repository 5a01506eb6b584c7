"""The Program of a step by several GPUs, as it is lowered for an H200. Needs no GPU."""

from __future__ import annotations

from functools import partial

import pytest
from thread_ranks import ThreadRank, on_ranks

from adtrain import config
from adtrain.backends.cuda.lower import Lowering
from adtrain.backends.cuda.runtime.layout import Layout
from adtrain.core.primitive import Trait
from adtrain.core.program import Program
from adtrain.core.target import H200
from adtrain.passes import SIMPLIFY, fold_collectives, gpu_fusions, optimize_regions, place_collectives
from adtrain.passes.place_collectives import exchange_done_p
from adtrain.training.preparation import outline

RANKS = 2


def step(name: str, *settings: str) -> Program:
    """The Program of this rank."""
    passes = (*SIMPLIFY, *gpu_fusions(H200))
    placed = (fold_collectives, partial(optimize_regions, passes=passes), place_collectives)
    return outline(config.load(name, settings)).step_program(passes=placed)


@pytest.mark.parametrize("name", ["mlp", "cnn", "lenet5-augmented"])
def test_all_equations_have_kernels_and_all_ranks_the_same_exchanges(name: str) -> None:
    def lowered(rank: ThreadRank) -> list[tuple[str, int]]:
        program, lowering = step(name, "training.clip_norm=1.0"), Lowering(H200)
        for e in program.equations:
            assert lowering.launches(e) or e.has(Trait.RESHAPE) or e.has(Trait.COLLECTIVE)
        layout = Layout(program, lowering)
        assert layout.repeats  # ten steps in one graph
        exchanges = [e for e in program.equations if e.has(Trait.COLLECTIVE)]
        waited_for = [e.inputs[0] for e in program.equations if e.primitive is exchange_done_p]
        assert sorted(map(id, waited_for)) == sorted(id(e.outputs[0]) for e in exchanges)
        return [(e.primitive.name, e.outputs[0].size) for e in exchanges]

    first, second = on_ranks(RANKS, lowered)
    assert first == second


def test_gradients_and_parameters_are_joined_in_one_launch_each() -> None:
    def launches(rank: ThreadRank) -> list[int]:
        lowering = Lowering(H200)
        return [len(lowering.launches(e)) for e in step("mlp").equations if e.primitive.name == "concatenate"]

    assert on_ranks(RANKS, launches) == [[1, 1]] * RANKS


def test_one_gpu_has_no_exchange() -> None:
    program = step("mlp", "data.shards=2")
    assert not any(e.has(Trait.COLLECTIVE) for e in program.equations)
