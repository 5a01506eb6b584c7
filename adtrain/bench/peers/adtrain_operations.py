"""adtrain's own operations, each as it runs inside a Program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from adtrain import ops
from adtrain.bench.ops.sweep import PASSES
from adtrain.bench.peers.op_cases import REPEATS, OpCase, OpRunner
from adtrain.core.array import Value, array
from adtrain.core.autodiff import vjp
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Staged, stage
from adtrain.core.staging_trace import evaluate


def operation(case: OpCase, phase: str, device: str, form: str) -> OpRunner:
    """The operation REPEATS times in one Program, so that the cost of starting a Program is shared."""
    args = [array(x, device=device) for x in case.arrays()]
    with ops.matmul_precision(case.precision):
        if phase == "forward":
            once = stage(case.of(ops), PASSES)
        else:
            _, pullback = vjp(lambda *floats: case.of(ops)(*case.with_indices(args, floats)), *case.floats(args))
            args = [array(case.cotangent(), device=device)]
            once = stage(lambda ct: pullback(ct), PASSES)
        staged = unrolled(once.program(*args), REPEATS)

    def run(calls: int) -> float:
        for _ in range(calls):
            found = staged(*args)
        return float(found[0].numpy().flat[0])  # waits for the device

    def results(*cotangent: np.ndarray) -> list[np.ndarray]:
        with ops.matmul_precision(case.precision):
            found: Any = once(*([array(x, device=device) for x in cotangent] or args))
        return [x.numpy() for x in (found if isinstance(found, tuple) else (found,))]

    return OpRunner(run, results)


def unrolled(program: Program, times: int) -> Staged:
    """The Program repeated `times` times as one function, which returns the first element of each result."""

    def repeat(*args: Value) -> Sequence[Value]:
        found = [evaluate(program, args) for _ in range(times)][-1]
        return [x[(slice(0, 1),) * x.ndim] for x in found]

    return stage(repeat, [rebind_bodies])


def rebind_bodies(program: Program) -> Program:
    """The Program with the bodies of its fused equations over its own variables.

    Tracing a Program again copies its equations, but leaves their bodies over the variables of the original.
    """
    return replace(program, equations=tuple(_rebound({}, e) for e in program.equations))


def _rebound(names: Mapping[Variable, Variable], equation: Equation) -> Equation:
    """The equation with its variables replaced as `names` says, and its body over the new variables."""
    inputs, outputs = (tuple(names.get(v, v) for v in vs) for vs in (equation.inputs, equation.outputs))
    params = dict(equation.params)
    if equation.form:
        body: Program = params["body"]
        inner = {v: Variable(v.type, v.device) for e in body.equations for v in e.outputs}
        inner |= dict(zip((*body.inputs, *body.outputs), (*inputs, *outputs), strict=True))
        equations = tuple(_rebound(inner, e) for e in body.equations)
        params["body"] = Program(
            tuple(inner[v] for v in body.inputs), {}, equations, tuple(inner[v] for v in body.outputs)
        )
    return replace(equation, inputs=inputs, outputs=outputs, params=params)
