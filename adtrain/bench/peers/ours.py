"""adtrain's own side: a step as training takes it, and an operation as it runs inside a Program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np

from adtrain import ops, training
from adtrain.bench.ops.sweep import PASSES
from adtrain.bench.peers.op_cases import REPEATS, OpCase, OpWork
from adtrain.bench.peers.steps import CHUNK, Job, Runner
from adtrain.core.array import Value, array
from adtrain.core.autodiff import vjp
from adtrain.core.fused import FUSED
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Staged, evaluate, stage
from adtrain.training.step import empty_log, repeated


def runner(job: Job) -> Runner:
    """The library's own step, many at a time, the order of their batches uploaded with them."""
    experiment, device, chunk = job.experiment, job.device, CHUNK[job.device]
    state, seed = experiment.initial_state(device), experiment.seed(device)
    examples = training.on_device(experiment.train, device)
    orders = cycle(job.orders)

    def taken() -> Value:
        nonlocal state
        carried = state, empty_log(chunk, device)
        state, log = repeated(experiment.logged_step, chunk, carried, seed, *examples.batches(next(orders)))
        return log.loss

    def run(calls: int) -> float:
        for _ in range(calls):
            losses = taken()
        return float(losses.numpy()[-1])

    return Runner(lambda: taken().numpy().tolist(), run)


def operation(case: OpCase, phase: str, device: str) -> OpWork:
    """The operation REPEATS times in one Program, so that starting it takes little of the time."""
    args = [array(x, device=device) for x in case.arrays()]
    with ops.matmul_precision(case.precision):
        if phase == "forward":
            once = stage(case.of(ops), PASSES)
        else:
            _, pullback = vjp(lambda *floats: case.of(ops)(*case.with_indices(args, floats)), *case.floats(args))
            args = [array(case.cotangent(), device=device)]
            once = stage(lambda ct: pullback(ct), PASSES)
        staged = many(once.program(*args), REPEATS)

    def run(calls: int) -> float:
        for _ in range(calls):
            found = staged(*args)
        return float(found[0].numpy().flat[0])  # waits

    def results(*cotangent: np.ndarray) -> list[np.ndarray]:
        with ops.matmul_precision(case.precision):
            found: Any = once(*([array(x, device=device) for x in cotangent] or args))
        return [x.numpy() for x in (found if isinstance(found, tuple) else (found,))]

    return OpWork(run, results)


def many(program: Program, times: int) -> Staged:
    """The Program so many times in a row as one function, which returns the first element of each result."""

    def repeat(*args: Value) -> Sequence[Value]:
        found = [evaluate(program, args) for _ in range(times)][-1]
        return [x[(slice(0, 1),) * x.ndim] for x in found]

    return stage(repeat, [with_own_bodies])


def with_own_bodies(program: Program) -> Program:
    """The Program, whose fused equations come from another one, with bodies over the variables that it has itself."""
    return replace(program, equations=tuple(_over_own({}, e) for e in program.equations))


def _over_own(names: Mapping[Variable, Variable], equation: Equation) -> Equation:
    """The equation over the variables that `names` gives for others, and its body over those."""
    inputs, outputs = (tuple(names.get(v, v) for v in vs) for vs in (equation.inputs, equation.outputs))
    params = dict(equation.params)
    if equation.primitive in FUSED:
        body: Program = params["body"]
        inner = {v: Variable(v.type, v.device) for e in body.equations for v in e.outputs}
        inner |= dict(zip((*body.inputs, *body.outputs), (*inputs, *outputs), strict=True))
        equations = tuple(_over_own(inner, e) for e in body.equations)
        params["body"] = Program(
            tuple(inner[v] for v in body.inputs), {}, equations, tuple(inner[v] for v in body.outputs)
        )
    return replace(equation, inputs=inputs, outputs=outputs, params=params)
