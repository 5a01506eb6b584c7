"""Passes: each alone keeps every number of random programs, and leaves out what it should."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from adtrain import ops, passes
from adtrain.core.program import Program
from adtrain.core.staging import stage

X = np.linspace(0.5, 2, 6).reshape(2, 3)


@pytest.mark.parametrize("improve", passes.SIMPLIFY)
def test_random_programs_compute_the_same_bits_before_and_after(improve: Any) -> None:
    graphs = pytest.importorskip("test_random_graphs")  # needs PyTorch, its oracle

    @given(graphs.graphs())
    def check(graph: Any) -> None:
        shapes, instructions = graph
        inputs = graphs.inputs_of(shapes)

        def f(*xs: Any) -> Any:
            nodes = graphs.evaluate(xs, instructions, 0)
            return nodes[-1], ops.sum(nodes[len(nodes) // 2])

        for before, after in zip(stage(f)(*inputs), stage(f, [improve])(*inputs), strict=True):
            np.testing.assert_array_equal(before.numpy(), after.numpy())

    check()


def names(program: Program) -> list[str]:
    return [equation.primitive.name for equation in program.equations]


def test_dead_code_goes_and_what_an_output_needs_stays() -> None:
    def f(x: Any) -> Any:
        ops.sin(ops.cos(x))
        return ops.exp(ops.tanh(x))

    assert names(stage(f).program(X)) == ["cos", "sin", "tanh", "exp"]
    assert names(stage(f, [passes.remove_dead_code]).program(X)) == ["tanh", "exp"]


def test_what_was_computed_is_not_computed_again() -> None:
    def f(x: Any) -> Any:
        return ops.sin(x * 2.0) + ops.sin(x * 2.0) * ops.sum(x, 0) + ops.sum(x, 1, keepdims=True)

    program = stage(f, [passes.merge_common_subexpressions]).program(X)
    assert sorted(names(program)).count("sin") == 1
    assert names(program).count("sum") == 2  # other axes: another sum
    assert len(program.constants) == 1


def test_zeros_of_both_signs_are_kept_apart() -> None:
    def f(x: Any) -> Any:
        return x * ops.full((2, 3), 0.0, np.float64), x * ops.full((2, 3), -0.0, np.float64)

    for a, b in zip(stage(f, passes.SIMPLIFY)(X), f(X), strict=True):
        np.testing.assert_array_equal(np.signbit(a.numpy()), np.signbit(b.numpy()))


def test_what_depends_on_constants_alone_is_computed_once() -> None:
    table = np.arange(3.0)

    def f(x: Any) -> Any:
        return x + ops.exp(ops.sin(table) * 2.0)

    program = stage(f, passes.SIMPLIFY).program(X)
    assert names(program) == ["add"]
    np.testing.assert_array_equal(stage(f, passes.SIMPLIFY)(X).numpy(), f(X).numpy())


def test_large_constants_stay_equations() -> None:
    program = stage(lambda x: x + ops.exp(np.zeros((100, 100))).sum(), passes.SIMPLIFY).program(X)
    assert "exp" in names(program)
