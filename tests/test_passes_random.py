"""Passes on random Programs and on training steps: the results stay the same, and the Programs are valid.

With NumPy the results have the same bits before and after a pass. Only fuse_maxpool_gradients changes the order of
sums, because it leaves out zeros.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from program_samples import ALL, ON_GPU, OPTIMIZERS, arguments, everywhere, training_program
from random_programs import graphs, program_of
from sweeps import check_examples, examples

from adtrain.backends.cpu.numpy_program import NumpyProgram
from adtrain.core.fused import HORIZONTAL, fuse
from adtrain.core.program import Program
from adtrain.passes.groups import Groups

quickly = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

# A second fuse_maxpool_gradients moves a mask through a second pooling. A second fuse_horizontal sees a group as one
# equation and may merge it with others.
REPEATED = ("fuse_maxpool_gradients", "fuse_horizontal")


def name_of(improve: Any) -> str:
    """The name of a pass, also of one with arguments."""
    return getattr(improve, "func", improve).__name__


IDEMPOTENT = [p for p in (*ALL, *ON_GPU) if name_of(p) not in REPEATED]
DEVICES = pytest.mark.parametrize("improve_all", [ALL, ON_GPU], ids=["cpu", "gpu"])


@pytest.fixture(autouse=True)
def items_of_small_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random graphs have at most four items."""
    monkeypatch.setattr(sys.modules["adtrain.backends.cpu.forms.batchwise"], "MIN_ITEMS", 1)


def stages(program: Program, improve_all: Sequence[Any]) -> Iterator[tuple[Any, Program, Program]]:
    """Each pass with a Program before and after it."""
    before = program
    for improve in improve_all:
        after = improve(before)
        yield improve, before, after
        before = after


@lru_cache(maxsize=8)  # the result of a pass is the argument of the next one
def results(program: Program) -> Sequence[np.ndarray]:
    return NumpyProgram(program).run(arguments(program))[0]


def assert_same_bits(program: Program, other: Program) -> None:
    for a, b in zip(results(program), results(other), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype


def assert_consistent(program: Program, like: Program) -> None:
    """Check what Program does not check: the types of equations and of their bodies."""
    assert program.inputs == like.inputs
    assert program.donated == like.donated
    assert [v.type for v in program.outputs] == [v.type for v in like.outputs]
    for e in everywhere(program):
        assert e.primitive.output_types([v.type for v in e.inputs], e.params) == tuple(v.type for v in e.outputs)
        body = e.params.get("body")
        if body is not None:
            assert (body.inputs, body.outputs) == (e.inputs, e.outputs)


@examples(8, 40)
def test_random_programs_compute_the_same_bits_before_and_after_each_pass(examples: int) -> None:
    def check(graph: Any) -> None:
        program = program_of(graph)
        alone = [(improve, program, improve(program)) for improve in (*ALL, *ON_GPU)]
        for improve, before, after in [*stages(program, ALL), *stages(program, ON_GPU), *alone]:
            try:
                assert_consistent(after, before)
                assert_same_bits(before, after)
            except AssertionError as error:
                raise AssertionError(f"{name_of(improve)}: {error}\n{before}\n{after}") from error

    check_examples(examples, check, graphs.graphs())


@DEVICES
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_steps_compute_the_same_before_and_after_each_pass(optimizer: str, improve_all: Any) -> None:
    for improve, before, after in stages(training_program(optimizer), improve_all):
        assert_consistent(after, before)
        if name_of(improve) != "fuse_maxpool_gradients":
            assert_same_bits(before, after)
        for a, b in zip(results(before), results(after), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-13)


@examples(8, 40)
def test_a_second_run_of_a_pass_changes_nothing(examples: int) -> None:
    def check(graph: Any) -> None:
        program = program_of(graph)
        for improve in IDEMPOTENT:
            once = improve(program)
            assert str(improve(once)) == str(once), name_of(improve)
        for improve_all in (ALL, ON_GPU):
            for improve, _, improved in stages(program, improve_all):
                if improve in IDEMPOTENT:
                    assert str(improve(improved)) == str(improved), name_of(improve)

    check_examples(examples, check, graphs.graphs())


@DEVICES
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_second_run_of_a_pass_changes_nothing_in_a_training_step(optimizer: str, improve_all: Any) -> None:
    for improve, _, once in stages(training_program(optimizer), improve_all):
        if name_of(improve) != "fuse_horizontal":
            assert str(improve(once)) == str(once), name_of(improve)


def is_acyclic(groups: Groups, merged: set[int]) -> bool:
    """Whether there is an order of the groups if those of `merged` are one."""
    name = {g: min(merged) if g in merged else g for g in groups.members}
    needs: dict[int, set[int]] = {g: set() for g in name.values()}
    for g in groups.members:
        needs[name[g]] |= {name[p] for p in groups.producers(g)} - {name[g]}
    while ready := {g for g, before in needs.items() if not before}:
        needs = {g: before - ready for g, before in needs.items() if g not in ready}
    return not needs


@quickly
@given(graphs.graphs(), st.data())
def test_groups_merge_exactly_where_no_cycle_arises(graph: Any, data: Any) -> None:
    program = program_of(graph)
    groups = Groups(program)
    for _ in range(data.draw(st.integers(0, 12))):
        a, b = (data.draw(st.sampled_from(sorted(groups.members))) for _ in range(2))
        if a == b:
            assert not groups.can_merge(a, b)
            continue
        assert groups.can_merge(a, b) == is_acyclic(groups, {a, b})
        if groups.can_merge(a, b):
            groups.merge(a, b)
            assert sorted(i for members in groups.members.values() for i in members) == list(range(len(groups.of)))
    fused = groups.rewritten(lambda equations, needed: fuse(HORIZONTAL, equations, needed))
    assert len(fused.equations) == len(groups.members)
    assert_same_bits(program, fused)
