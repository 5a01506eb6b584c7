"""Memory plans: no value is overwritten before its last use, and values share memory where they can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from memory_tokens import assert_plan_holds, bytes_of
from program_samples import ALL, ON_GPU, OPTIMIZERS, for_gpu, in_all_forms, training_program
from random_programs import graphs, program_of

from adtrain import ops
from adtrain.backends.cpu.codegen import workspace
from adtrain.core.program import Equation, Program
from adtrain.core.staging import stage
from adtrain.passes.plan_memory import MemoryPlan, Place, plan_memory

quickly = settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])


def odd_sizes(equation: Equation) -> int:
    """Bytes of workspace: some equations need some, others none."""
    return len(equation.inputs) * 40 if len(equation.name) % 2 else 0


@quickly
@given(graphs.graphs())
def test_plans_of_random_programs_are_valid(graph: Any) -> None:
    for program in in_all_forms(program_of(graph)):
        for donated in (frozenset(), program.donated):
            form = replace(program, donated=donated)
            assert_plan_holds(form, plan_memory(form, odd_sizes), odd_sizes)
            assert_plan_holds(form, plan_memory(form, workspace), workspace)
    on_gpu = for_gpu(program_of(graph))
    assert_plan_holds(on_gpu, plan_memory(on_gpu, odd_sizes), odd_sizes)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_plans_of_training_steps_are_valid(optimizer: str) -> None:
    for program in in_all_forms(training_program(optimizer)):
        plan = plan_memory(program, workspace)
        assert_plan_holds(program, plan, workspace)
        assert plan.arena_bytes < plan.separate_bytes
    on_gpu = for_gpu(training_program(optimizer))
    assert_plan_holds(on_gpu, plan_memory(on_gpu, odd_sizes), odd_sizes)


@pytest.mark.parametrize("improve", [ALL, ON_GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_training_step_overwrites_its_state(optimizer: str, improve: Any) -> None:
    program = training_program(optimizer, improve=improve)
    plan = plan_memory(program)
    arrays = [v for v in program.outputs[:-1] if v.size > 1]
    assert len(arrays) == {"sgd": 16, "adam": 24}[optimizer]
    assert all(plan.places[v].where == "input" for v in arrays)


X = np.ones((4, 6))


def planned(f: Any, *args: Any, donate: Any = (), improve: Any = ()) -> tuple[Program, MemoryPlan]:
    program = stage(f, improve, donate).program(*args)
    plan = plan_memory(program)
    assert_plan_holds(program, plan, lambda e: 0)
    return program, plan


def test_consecutive_elementwise_operations_share_memory() -> None:
    _, plan = planned(lambda x: ops.sum(ops.exp(ops.sin(ops.tanh(x)))), X)
    assert plan.arena_bytes == X.nbytes


def test_values_that_are_alive_together_do_not_share_memory() -> None:
    def f(x: Any) -> Any:
        transposed = ops.transpose(x)
        return ops.sum(ops.matmul(x, transposed)) + ops.sum(transposed)

    program, plan = planned(f, X)
    transposed, product = (e.outputs[0] for e in program.equations if e.name in ("transpose", "matmul"))
    assert not bytes_of(transposed, plan).touches(bytes_of(product, plan))


@pytest.mark.parametrize("improve", [ALL, ON_GPU], ids=["cpu", "gpu"])
def test_rows_are_put_into_a_donated_array_that_is_not_read_again(improve: Any) -> None:
    caches, rows, positions = np.zeros((2, 3, 5, 4), np.float32), np.ones((2, 3, 4), np.float32), np.array([1, 4])

    def put(x: Any, rows: Any, positions: Any) -> Any:
        return ops.put_rows(x, ops.exp(rows), positions, 2)

    assert len(planned(put, caches, rows, positions, donate=(0,), improve=improve)[1].in_place) == 1
    both = planned(lambda x, *more: x + put(x, *more), caches, rows, positions, donate=(0,), improve=improve)[1]
    assert len(both.in_place) == 1  # the sum, which reads the donated array


@pytest.mark.parametrize(
    ("f", "count"),
    [
        (lambda x, y: x + y, 1),
        (lambda x, y: ops.transpose(ops.transpose(y)), 1),  # x is not read at all
        (lambda x, y: (x + y, ops.sum(x)), 0),  # read later
        (lambda x, y: (ops.sum(x), x + y), 1),
        (lambda x, y: (x, x + y), 0),  # x is a result
        (lambda x, y: ops.flip(x), 0),  # elements move
        (lambda x, y: ops.transpose(ops.reshape(x, (6, 4))), 0),
        (lambda x, y: ops.reshape(ops.flip(ops.reshape(x, (6, 4))), (4, 6)), 0),
        (lambda x, y: ops.reshape(ops.transpose(y), (4, 6)), 0),  # a view has no equation that writes
        (lambda x, y: x * ops.broadcast_to(ops.sum(x, 0), (4, 6)), 1),
        (lambda x, y: x.astype("float32"), 0),  # another element size
    ],
)
def test_results_overwrite_a_donated_array_only_after_its_last_read(f: Any, count: int) -> None:
    assert len(planned(f, X, X, donate=(0,))[1].in_place) == count
    assert len(planned(f, X, X)[1].in_place) == 0


def test_a_product_does_not_overwrite_a_weight_that_it_reads() -> None:
    square = np.ones((6, 6))
    assert len(planned(lambda w: w - ops.matmul(w, w), square, donate=(0,), improve=ALL)[1].in_place) == 0
    program, plan = planned(lambda w, x: w - ops.matmul(x, x), square, square, donate=(0,), improve=ALL)
    assert [e.name for e in program.equations] == ["product"]
    assert len(plan.in_place) == 1


def test_a_plan_with_overlapping_values_is_detected() -> None:
    program = training_program("sgd")
    plan = plan_memory(program, workspace)
    same = {v: Place("arena", 0) if place.where == "arena" else place for v, place in plan.places.items()}
    with pytest.raises(AssertionError):
        assert_plan_holds(program, replace(plan, places=same), workspace)
