"""What the CPU backend says beforehand about the memory of a Program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from adtrain import ops
from adtrain.backends.cpu import numpy_program
from adtrain.backends.cpu.compiled_program import CompiledProgram
from adtrain.backends.cpu.cpu_backend import CpuBackend
from adtrain.backends.cpu.fusions import cpu_fusions
from adtrain.core.array import Value
from adtrain.core.program import LOOPS, Program, fuse
from adtrain.core.staging import stage
from adtrain.passes import SIMPLIFY

X = np.zeros((10, 10))


def f(x: Value) -> Value:
    """exp 800 bytes, its square 800, a view of that, 8 bytes a row of its sums."""
    y = ops.exp(x)
    return ops.sum(ops.reshape(y * y, (5, 20)), axis=1)


def test_numpy_program_frees_a_value_after_its_last_reader() -> None:
    assert numpy_program.memory(stage(f).program(X)) == (1600, 1600 + 40, 0)


def test_numpy_program_keeps_values_inside_a_fused_equation() -> None:
    exp, square, view, total = (program := stage(f).program(X)).equations
    loops = fuse(LOOPS, [exp, square], square.outputs)
    fused = Program(program.inputs, {}, (loops, view, total), program.outputs)
    assert numpy_program.memory(fused) == (1600, 1600 + 40, 0)


@pytest.mark.compiled
def test_compiled_program_reports_the_memory_it_allocates() -> None:
    def g(x: Value, w: Value) -> Any:
        return ops.softmax(ops.relu(x @ w) @ w + 0.5), ops.sum(x)

    program = stage(g, (*SIMPLIFY, *cpu_fusions())).program(X, X)
    said, made = CpuBackend().memory(program), CompiledProgram(program)
    constants = sum(x.nbytes for x in made.constants)
    fresh = sum(np.empty(*made_type).nbytes for _, made_type in made.fresh)
    assert said == (
        made.arena.size + constants + fresh,
        made.plan.separate_bytes + constants + fresh,
        made.scratch.size,
    )
