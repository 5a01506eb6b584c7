"""The Program of a step by several GPUs, as it is lowered for an H200. Needs no GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from test_cuda_layout import run
from thread_ranks import ThreadRank, on_ranks
from training_runs import write_config

from adtrain import config, training
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.batch_prefetch import prefetch_batch
from adtrain.backends.cuda.forms.horizontal import join_one_blocks
from adtrain.backends.cuda.fusions import gpu_fusions
from adtrain.backends.cuda.lower import Lowering
from adtrain.backends.cuda.runtime.layout import Layout
from adtrain.core import tree
from adtrain.core.array import Value, array
from adtrain.core.primitive import Trait
from adtrain.core.program import Program
from adtrain.core.staging import Pass, evaluate
from adtrain.passes import SIMPLIFY, fold_collectives, optimize_regions, place_collectives, place_views
from adtrain.passes.order import exchange_done_p
from adtrain.passes.plan_memory import Place, plan_memory
from adtrain.training.experiment import LOG_ROWS
from adtrain.training.preparation import outline
from adtrain.training.step import empty_log

RANKS = 2


def step(name: str, *settings: str) -> Program:
    """The Program of this rank."""
    return outline(config.load(name, settings)).step_program(passes=placed_for_gpus())


def placed_for_gpus() -> list[Pass]:
    passes = (*SIMPLIFY, *gpu_fusions(H200), join_one_blocks)
    place = partial(place_collectives, early_updates=True)
    return [fold_collectives, partial(optimize_regions, passes=passes), place, place_views]


@pytest.mark.parametrize("name", ["mlp", "cnn", "lenet5-augmented"])
def test_all_equations_have_kernels_and_all_ranks_the_same_exchanges(name: str) -> None:
    def lowered(rank: ThreadRank) -> list[tuple[str, int]]:
        program, lowering = step(name, "training.clip_norm=1.0"), Lowering(H200)
        for e in program.equations:
            assert lowering.launches(e) or e.is_view or e.has(Trait.COLLECTIVE)
        layout = Layout(program, lowering)
        assert layout.repeats  # ten steps in one graph
        exchanges = [e for e in program.equations if e.has(Trait.COLLECTIVE)]
        waited_for = [e.inputs[0] for e in program.equations if e.primitive is exchange_done_p]
        assert sorted(map(id, waited_for)) == sorted(id(e.outputs[0]) for e in exchanges)
        return [(e.name, e.outputs[0].size) for e in exchanges]

    first, second = on_ranks(RANKS, lowered)
    assert first == second


def test_gradients_are_computed_where_they_are_sent_and_parameters_received_where_they_are_read() -> None:
    """No launch copies them: a step of `mlp` has 10 launches and 3 exchanges."""

    def launches(rank: ThreadRank) -> int:
        program, lowering = step("mlp"), Lowering(H200)
        sent = next(e.inputs[0] for e in program.equations if e.name == "all_to_all")
        vector = next(e.inputs[0] for e in program.equations if sent in e.outputs)
        assert next(e for e in program.equations if vector in e.outputs).has(Trait.CONCAT_VIEW)
        plan = plan_memory(program, lowering.scratch)
        assert plan.places[program.outputs[0]] == Place("input", 0)  # the vector of parameters
        return sum(len(lowering.launches(e)) for e in program.equations)

    assert on_ranks(RANKS, launches) == [10] * RANKS


WIDE = (
    "model.layers=[{linear: 1500}, relu, {linear: 1500}, relu, {linear: 10}]",
    "optimizer={sgd: {lr: 0.1}}",
    "data.batch_size=2048",
)
"""Two buckets, in which gaps of equal lengths follow the parameters."""


def test_no_launch_copies_the_gradients_of_several_buckets() -> None:
    def check(rank: ThreadRank) -> None:
        program = step("mlp", *WIDE)
        producer = {v: e for e in program.equations for v in e.outputs}
        sent = [e.inputs[0] for e in program.equations if e.name == "all_to_all"]
        assert len(sent) == 2
        assert all(producer[producer[v].inputs[0]].has(Trait.CONCAT_VIEW) for v in sent)

    on_ranks(RANKS, check)


def test_a_bucket_is_updated_in_place_while_earlier_gradients_are_computed() -> None:
    """Its all-gather begins before the weight gradient of the first layer, and ends after it."""

    def check(rank: ThreadRank) -> None:
        program = step("mlp", *WIDE)
        exchanges = [e for e in program.equations if e.has(Trait.COLLECTIVE)]
        assert [e.name for e in exchanges] == [
            *("all_to_all", "all_gather"),  # of the last two layers
            *("all_to_all", "all_gather", "all_gather"),  # of the first layer, with the metrics between
        ]
        place = {e: i for i, e in enumerate(program.equations)}
        done = {e.inputs[0]: i for i, e in enumerate(program.equations) if e.primitive is exchange_done_p}
        gather = exchanges[1]
        computed = [(e, v.type.shape) for e in program.equations if not e.is_view for v in e.outputs]
        (first_weight,) = (place[e] for e, shape in computed if shape == (1500, 784))
        assert place[gather] < first_weight < done[gather.outputs[0]]
        plan = plan_memory(program, Lowering(H200).scratch)
        assert [plan.places[v] for v in program.outputs[:2]] == [Place("input", 0), Place("input", 1)]
        assert Layout(program, Lowering(H200)).sent_from_arena == set(exchanges)

    on_ranks(RANKS, check)


DEEP = "model.layers=[{linear: 1500}, relu, {linear: 1500}, relu, {linear: 1500}, relu, {linear: 1500}, {linear: 10}]"
"""Four buckets."""


def test_the_gradients_of_the_next_bucket_are_computed_before_a_bucket_is_updated() -> None:
    """So nothing waits for an all-to-all that has just begun, except those of the last two buckets."""

    def check(rank: ThreadRank) -> None:
        program = step("mlp", *WIDE, DEEP)
        exchanges = [e for e in program.equations if e.has(Trait.COLLECTIVE)]
        assert [e.name for e in exchanges[:8]] == [
            *("all_to_all", "all_to_all", "all_gather"),
            *("all_to_all", "all_gather", "all_gather"),
            *("all_to_all", "all_gather"),
        ]
        place = {e: i for i, e in enumerate(program.equations)}
        done = {e.inputs[0]: i for i, e in enumerate(program.equations) if e.primitive is exchange_done_p}
        first, second = exchanges[:2]
        assert place[second] < done[first.outputs[0]]

    on_ranks(RANKS, check)


def test_one_gpu_has_no_exchange() -> None:
    program = step("mlp", "data.shards=2")
    assert not any(e.has(Trait.COLLECTIVE) for e in program.equations)


def test_repeated_steps_with_a_prefetched_batch_equal_single_steps(tmp_path: Path) -> None:
    path = write_config(tmp_path)

    def both(rank: ThreadRank) -> tuple[list[np.ndarray], list[np.ndarray]]:
        experiment = training.prepare(config.load(path, ["optimizer={sgd: {lr: 0.1, momentum: 0.9}}"]))
        program = experiment.step_program(passes=placed_for_gpus())
        assert prefetch_batch(program, H200).prologue
        state = experiment.divided(tree.map(lambda x: x.numpy(), experiment.initial_state("cpu")))
        log = empty_log(experiment.network.task, LOG_ROWS, "cpu")
        order = np.random.default_rng(rank.rank).integers(0, len(experiment.train), (LOG_ROWS, 8))
        given = (
            state,
            log,
            experiment.seed("cpu"),
            np.asarray(experiment.train.images),
            experiment.train.labels,
            order,
        )
        args = [np.asarray(x.numpy() if isinstance(x, Value) else x) for x in tree.leaves(given)]
        expected = list(args)
        for _ in range(3):
            expected[: len(program.outputs)] = [x.numpy() for x in evaluate(program, [*map(array, expected)])]
        return run(program, args, 3), expected

    for found, expected in on_ranks(RANKS, both):
        for x, y in zip(found, expected, strict=False):
            np.testing.assert_array_equal(x, y)
