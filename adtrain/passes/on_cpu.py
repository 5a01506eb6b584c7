"""Passes whose fused equations only the CPU has kernels for."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from adtrain.core.program import Program


def on_cpu(improve: Callable[[Program], Program]) -> Callable[[Program], Program]:
    """The pass ``improve`` for Programs on the CPU; others stay as they are."""

    @wraps(improve)
    def improved(program: Program) -> Program:
        variables = (*program.inputs, *program.constants, *program.outputs)
        return improve(program) if all(v.device == "cpu" for v in variables) else program

    return improved
