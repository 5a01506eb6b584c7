"""Barriers: in the C of a Program one stands between any two equations of which one writes what the other touches."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pytest
from memory_tokens import Bytes, bytes_of, workspace_of
from program_samples import ALL, OPTIMIZERS, in_all_forms, training_program
from random_programs import graphs, program_of
from sweeps import check_examples, examples

from adtrain import ops
from adtrain.backends.cpu import codegen
from adtrain.backends.cpu.codegen import generate, loops, workspace
from adtrain.core.program import Program
from adtrain.core.staging import stage
from adtrain.passes.plan_memory import plan_memory


class Call(NamedTuple):
    """An equation as the entry calls it: behind a barrier or not, and by the first thread alone or by all."""

    barrier: bool
    alone: bool


def calls(text: str) -> list[Call]:
    functions = dict(re.findall(r" void (\w+)\(const Team \*team[^{]*\) \{\n(.*?)\n\}", text, re.DOTALL))

    def alone(name: str) -> bool:
        lines = functions[name].splitlines()
        inner = re.match(r" *(\w+)\(", lines[0])
        if len(lines) == 1 and inner and inner[1] in functions:
            return alone(inner[1])
        return lines[0].strip() == "if (team->thread > 0)"

    found: list[Call] = []
    barrier, called = False, None
    for line in map(str.strip, text.partition("int64_t run(")[2].splitlines()):
        barrier = barrier or line == "#pragma omp barrier"
        if call := re.match(r"(\w+)\(&team, &memory\);", line):
            called = call[1]
        if "seconds +" in line or "seconds[" in line:  # the end of an equation
            found.append(Call(barrier, called is not None and alone(called)))
            barrier, called = False, None
    return found


def assert_barriers_hold(program: Program) -> None:
    plan = plan_memory(program, workspace)
    found = calls(generate(program, plan).text)
    assert len(found) == len(program.equations)
    reads: list[list[Bytes]] = []
    writes: list[list[Bytes]] = []
    for i, e in enumerate(program.equations):
        runs = e.name != "reshape"
        reads.append([bytes_of(v, plan) for v in e.inputs] if runs else [])
        writes.append([*(bytes_of(v, plan) for v in e.outputs), *workspace_of(e, plan, i, workspace)] if runs else [])
        for k in range(i):
            conflict = any(
                a.touches(b)
                for mine, theirs in ((reads[i], writes[k]), (writes[i], writes[k]), (writes[i], reads[k]))
                for a in mine
                for b in theirs
            )
            in_order = found[k].alone and found[i].alone
            behind = any(call.barrier for call in found[k + 1 : i + 1])
            assert not conflict or in_order or behind, f"no barrier between equations {k} and {i}"


@pytest.fixture(params=[0, loops.FEW_ELEMENTS], ids=["all loops divided", "small loops by one thread"])
def few_elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "FEW_ELEMENTS", request.param)


@pytest.mark.exhaustive
@examples(plain=5, all=10)
def test_random_programs_have_the_barriers_they_need(few_elements: None, examples: int) -> None:
    def check(graph: Any) -> None:
        for form in in_all_forms(program_of(graph)):
            assert_barriers_hold(form)

    check_examples(examples, check, graphs.graphs())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_steps_have_the_barriers_they_need(few_elements: None, optimizer: str) -> None:
    for form in in_all_forms(training_program(optimizer)):
        assert_barriers_hold(form)


def test_independent_equations_have_no_barrier_between_them() -> None:
    x = np.ones((100, 100))
    form = stage(lambda x: (ops.exp(x), ops.sin(x), ops.sum(ops.tanh(x)))).program(x)
    assert calls(generate(form, plan_memory(form, workspace)).text) == [
        Call(False, False), Call(False, False), Call(False, False), Call(True, False)
    ]  # fmt: skip


def test_equations_of_one_thread_have_no_barrier_between_them() -> None:
    x = np.ones(3)
    form = stage(lambda x: ops.exp(ops.sin(x))).program(x)
    assert calls(generate(form, plan_memory(form, workspace)).text) == [Call(False, True), Call(False, True)]


def test_a_missing_barrier_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codegen, "barriers", lambda form, plan: [False] * len(form.equations))
    with pytest.raises(AssertionError, match="no barrier between equations"):
        assert_barriers_hold(training_program("sgd", improve=ALL))
