"""Passes on random Programs and on training steps: the results are those that a pass declares, and Programs are valid.

NumPy computes the results before and after a pass. After a pass that is exact they have the same bits, also where they
are infinite or NaN.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from program_samples import ALL, ON_GPU, OPTIMIZERS, arguments, bfloat16_gradients, everywhere, training_program
from random_programs import graphs, program_of
from sweeps import check_examples, examples

import adtrain as ad
from adtrain import ops, passes
from adtrain.backends.cpu.numpy_program import NumpyProgram
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.fusions import gpu_fusions
from adtrain.core.primitive import Trait
from adtrain.core.program import HORIZONTAL, Program, fuse
from adtrain.core.staging import Results, results_of, stage
from adtrain.core.views import per_member
from adtrain.passes.groups import Groups

quickly = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

# A second fuse_maxpool_gradients moves a mask through a second pooling. A second pass for independent equations sees a
# group as one equation and may merge it with others. After recompute a kernel reads other arrays, and a second one may
# compute more of them.
REPEATED = ("fuse_maxpool_gradients", "fuse_horizontal", "fuse_side_by_side", "recompute")


def without_scopes(program: Program) -> str:
    """The text of a Program. A copy of an equation for a reader has the scope of this reader, even if it is fused."""
    return re.sub("  # .*", "", str(program))


def name_of(improve: Any) -> str:
    """The name of a pass, also of one with arguments."""
    return getattr(improve, "func", improve).__name__


IDEMPOTENT = [p for p in (*ALL, *ON_GPU) if name_of(p) not in REPEATED]
DEVICES = pytest.mark.parametrize("improve_all", [ALL, ON_GPU], ids=["cpu", "gpu"])


@pytest.fixture(autouse=True)
def limits_of_small_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random graphs have at most four items, and small values."""
    monkeypatch.setattr(sys.modules["adtrain.backends.cpu.fusions"], "MIN_ITEMS", 1)
    monkeypatch.setattr(sys.modules["adtrain.passes.recompute"], "MIN_BYTES", 0)


def stages(program: Program, improve_all: Sequence[Any]) -> Iterator[tuple[Any, Program, Program]]:
    """Each pass with a Program before and after it."""
    before = program
    for improve in improve_all:
        after = improve(before)
        yield improve, before, after
        before = after


@lru_cache(maxsize=8)  # the result of a pass is the argument of the next one
def results(program: Program, finite: bool = True) -> Sequence[np.ndarray]:
    """The results for normal numbers; with `finite=False` every fifth number is infinite or NaN."""
    given = arguments(program)
    for x in given:
        if not finite and x.dtype.kind == "f":
            x.flat[::5] = np.resize([np.inf, -np.inf, np.nan], x.flat[::5].shape)
    with np.errstate(all="ignore"):
        return of_members(program, given) if program.members else NumpyProgram(program).run(given)[0]


def of_members(program: Program, given: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """The results of a Program by member. NumPy computes one member after another."""
    known = {v: x.numpy() for v, x in program.constants.items()} | dict(zip(program.inputs, given, strict=True))
    for e in program.equations:
        if e.has(Trait.MEMBERS):
            known[e.outputs[0]] = known[e.inputs[0]]
            continue
        found = []
        for i in range(e.members or 1):
            out = e.primitive.reference(*(known[v][i] if v.members else known[v] for v in e.inputs), **e.params)
            found.append(out if isinstance(out, tuple) else (out,))
        of_all = zip(*found, strict=True)
        known |= {v: np.stack(xs) if v.members else xs[0] for v, xs in zip(e.outputs, of_all, strict=True)}
    return [known[v] for v in program.outputs]


def assert_results(improve: Any, before: Program, after: Program) -> None:
    """Check the claim of a pass on the results of a Program. bfloat16 rounds by 2e4 times what float32 does."""
    claim = results_of(improve)
    for a, b in zip(results(before), results(after), strict=True):
        assert a.dtype == b.dtype
        if claim is not Results.EXACT and a.dtype.kind == "f":
            largest = np.abs(a[np.isfinite(a)]).max(initial=1)
            np.testing.assert_allclose(a, b, rtol=0, atol=1e5 * np.finfo(a.dtype).eps * largest)
        else:
            np.testing.assert_array_equal(a, b)
    if claim is Results.EXACT:
        assert_same_bits(before, after, finite=False)


def assert_same_bits(program: Program, other: Program, finite: bool = True) -> None:
    for a, b in zip(results(program, finite), results(other, finite), strict=True):
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


@examples(3, 12)
def test_random_programs_keep_the_results_that_each_pass_declares(examples: int) -> None:
    def check(graph: Any) -> None:
        program = program_of(graph)
        alone = [(improve, program, improve(program)) for improve in (*ALL, *ON_GPU)]
        for improve, before, after in [*stages(program, ALL), *stages(program, ON_GPU), *alone]:
            try:
                assert_consistent(after, before)
                assert_results(improve, before, after)
            except AssertionError as error:
                raise AssertionError(f"{name_of(improve)}: {error}\n{before}\n{after}") from error

    check_examples(examples, check, graphs.graphs())


@DEVICES
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_steps_keep_the_results_that_each_pass_declares(optimizer: str, improve_all: Any) -> None:
    for improve, before, after in stages(training_program(optimizer), improve_all):
        assert_consistent(after, before)
        assert_results(improve, before, after)


def recurrent_program() -> Program:
    """The gradients of a large LSTM."""
    sums = 4 * 384
    shapes = (3, 2, 5), (sums, 5), (sums, 384), (sums,), (sums,)
    gradients = ad.grad(lambda *xs: ops.sum(ops.sin(ops.lstm(*xs)[0])), range(5))
    return stage(gradients, ()).program(*(np.zeros(shape, np.float32) for shape in shapes))


def member_program() -> Program:
    """A step of gradient descent for three members, each with a convolution and two linear layers."""

    def loss(filters: Any, w: Any, v: Any, x: Any) -> Any:
        y = ops.reshape(ops.conv2d(x, filters), (9, 20))
        return ops.mean(ops.square(ops.matmul(ops.relu(ops.matmul(y, w)), v)))

    def step(*args: Any) -> Any:
        grads = ad.grad(loss, (0, 1, 2))(*args)
        return [value - 0.1 * grad for value, grad in zip(args, grads, strict=False)]

    shapes = (3, 1, 2, 3, 3), (3, 20, 17), (3, 17, 5), (9, 2, 6, 7)
    return stage(per_member(step, (0, 0, 0, None)), ()).program(*(np.zeros(shape, np.float32) for shape in shapes))


def test_passes_for_members_keep_the_results_that_they_declare() -> None:
    applied = (passes.by_member, *passes.SIMPLIFY, *gpu_fusions(H200._replace(by_member=True)))
    changed = set()
    for improve, before, after in stages(member_program(), applied):
        assert_results(improve, before, after)
        changed |= {name_of(improve)} if str(before) != str(after) else set()
    assert changed >= {"by_member", "fuse_by_rows", "by_batching_rules"}


def bfloat16_program() -> Program:
    """The gradients of two small linear layers in bfloat16."""
    shapes = (9, 20), (20, 17), (17, 5), (17,)
    return stage(bfloat16_gradients, ()).program(*(np.zeros(shape, np.float32) for shape in shapes))


def test_the_gradients_of_a_recurrent_network_are_fused_without_rounding() -> None:
    name = "fuse_recurrent_gradients"
    ((improve, before, after),) = (x for x in stages(recurrent_program(), ON_GPU) if name_of(x[0]) == name)
    assert str(before) != str(after)
    assert results_of(improve) is Results.EXACT
    assert_same_bits(before, after)


def test_a_pass_that_declares_rounding_rounds() -> None:
    """So it does not keep more than it declares."""
    name = "choose_precision"
    ((improve, before, after),) = (x for x in stages(bfloat16_program(), ON_GPU) if name_of(x[0]) == name)
    assert results_of(improve) is Results.ROUNDING
    assert_results(improve, before, after)
    with pytest.raises(AssertionError):
        assert_same_bits(before, after)


@pytest.mark.compiled
def test_a_pass_that_declares_finite_values_only_may_leave_out_infinity() -> None:
    """0 times an infinite weight is NaN. The kernel leaves out the zeros of a gradient through max pooling."""

    def gradient(x: Any, w: Any) -> Any:
        return ad.grad(lambda x: ops.sum(ops.max_pool2d(ops.conv2d(ops.tanh(x), w), 2)))(x)

    (improve,) = (p for p in ALL if name_of(p) == "fuse_maxpool_gradients")
    assert results_of(improve) is Results.FINITE
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(4, 8, 14, 14)).astype(np.float32), rng.normal(size=(8, 8, 3, 3)).astype(np.float32)
    exact, fused = (stage(gradient, applied) for applied in ([p for p in ALL if p is not improve], ALL))
    np.testing.assert_allclose(fused(x, w).numpy(), exact(x, w).numpy(), rtol=1e-4, atol=1e-5)
    w[:, 0, 1, 1] = np.inf
    assert np.isnan(exact(x, w).numpy()).sum() > np.isnan(fused(x, w).numpy()).sum()


@examples(3, 12)
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
        if name_of(improve) not in REPEATED:
            assert without_scopes(improve(once)) == without_scopes(once), name_of(improve)


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
    positions = sorted(data.draw(st.sets(st.integers(0, len(groups.of) - 1), min_size=1)))
    merged, count = {groups.of[i] for i in positions}, len(groups.members)
    expected = is_acyclic(groups, merged)
    assert groups.merge_all(positions) == expected
    assert len(groups.members) == count - (len(merged) - 1 if expected else 0)
    fused = groups.rewritten(lambda equations, needed: fuse(HORIZONTAL, equations, needed))
    assert len(fused.equations) == len(groups.members)
    assert_same_bits(program, fused)
