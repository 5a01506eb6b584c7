"""adtrain itself as a system: steps, members, operations and whole trainings, as its own commands run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np

from adtrain import nn, ops, training
from adtrain.bench.op_table import OpCase
from adtrain.bench.ops import PASSES
from adtrain.bench.peers.jobs import CHUNK, REPEATS, Checked, Job, MembersJob, OpRunner, Runner
from adtrain.core import tree
from adtrain.core.array import Value, array
from adtrain.core.autodiff import vjp
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Staged, evaluate, stage
from adtrain.sweeps.members import WaveInputs
from adtrain.sweeps.step import Settings, empty_tally
from adtrain.training import Epoch, Observer, TrainState, on_device
from adtrain.training.step import empty_log, repeated


def steps(job: Job, form: str) -> Runner:
    """A call uploads the order of its batches, and runs the staged step CHUNK times."""
    experiment, device, chunk = job.experiment, job.device, CHUNK[job.device]
    state, seed = experiment.initial_state(device), experiment.seed(device)
    examples = training.on_device(experiment.train, device)
    orders = cycle(job.orders)

    def losses_of_call() -> Value:
        nonlocal state
        carried = state, empty_log(experiment.network.task, chunk, device)
        state, log = repeated(experiment.logged_step, chunk, carried, seed, *examples.batches(next(orders)))
        return log.loss

    def run(calls: int) -> float:
        for _ in range(calls):
            losses = losses_of_call()
        return float(losses.numpy()[-1])

    return Runner(lambda: losses_of_call().numpy().tolist(), run)


def members(job: MembersJob, form: str) -> Runner:
    """The training of all members. A call uploads the orders of its batches, and runs the staged step CHUNK times."""
    group, device, chunk = job.group, job.device, CHUNK[job.device]
    inputs, step = WaveInputs(group, group.members, device), group.programs.step
    settings = Settings(inputs.seeds, array(np.ones((job.count, chunk)), device=device), inputs.options, inputs.targets)
    state: Any = tree.map(lambda x: array(x, device=device), job.initial_state)
    tally = empty_tally(job.experiment.network.task, job.count, device)
    examples = on_device(group.whole, device)
    orders = cycle(np.ascontiguousarray(job.orders.swapaxes(1, 2)))
    total = np.zeros(job.count)

    def start_call() -> tuple[Any, ...]:
        """The images, labels and orders of the next call, whose steps begin with the first row of the orders."""
        nonlocal tally
        tally = tally._replace(position=array(np.int64(0), device=device))
        return examples.batches(next(orders))

    def take(steps: int, batches: tuple[Any, ...]) -> None:
        nonlocal state, tally
        state, tally = step.repeat(steps, state, tally, settings, *batches)

    def added_losses() -> np.ndarray:
        """float64 (members,): the sum of each member's losses over the examples since the last call."""
        nonlocal total
        before, total = total, tally.loss.numpy()
        return total - before

    def losses() -> Sequence[list[float]]:
        batches, found = start_call(), []
        for _ in range(chunk):
            take(1, batches)
            found.append((added_losses() / job.experiment.full_batch).tolist())
        return found

    def run(calls: int) -> float:
        for _ in range(calls):
            take(chunk, start_call())
        return float(np.mean(added_losses())) / (calls * chunk * job.experiment.full_batch)

    return Runner(losses, run)


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


class Epochs(Observer):
    """Notes the seconds of training and the test accuracy after each epoch."""

    def __init__(self, job: Job) -> None:
        self.job, self.found = job, list[Checked]()

    def epoch_done(self, epoch: Epoch, state: Callable[[], TrainState]) -> None:
        before, reached = self.found[-1].seconds if self.found else 0.0, state()
        self.found.append(Checked(before + epoch.seconds, accuracy(self.job, reached.params, reached.statistics)))


def race(job: Job, form: str) -> Callable[[Job], list[Checked]]:
    """A function that trains, and returns the epochs. Its jobs may differ from `job` in their seeds."""

    def trained(job: Job) -> list[Checked]:
        epochs = Epochs(job)
        training.run(job.experiment, job.device, [epochs])
        return epochs.found

    return trained


def accuracy(job: Job, params: nn.Params, statistics: nn.State) -> float:
    """The fraction of the test images that a model on the job's device gets right."""
    experiment = job.experiment
    examples = training.on_device(experiment.test, job.device)
    evaluation = training.Evaluation(experiment.evaluation_step, experiment.network.task, examples)
    score = evaluation.score(params, statistics)
    return float(score._asdict()["accuracy"])
