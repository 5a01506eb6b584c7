"""The loop that issues steps to the device, what its ranks agree on, and the search for the first NaN or infinity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from time import perf_counter
from typing import Any

import numpy as np

from adtrain import data
from adtrain.core import communicator, tree
from adtrain.core.array import Value, array, from_numpy
from adtrain.core.backend import Executable
from adtrain.core.primitive import Primitive
from adtrain.core.staging import Staged
from adtrain.core.trace import EvaluationTrace, base_trace, current_phase, current_scope
from adtrain.training.examples import BatchGroup, Examples, on_device
from adtrain.training.experiment import LOG_ROWS, Experiment
from adtrain.training.progress import Progress
from adtrain.training.step import TrainState, empty_log, repeated


def of_first_rank(number: int) -> int:
    """Rank 0's number."""
    return number if communicator.current().size == 1 else int(communicator.all_gathered(np.array(number))[0])


def any_rank(answer: bool) -> bool:
    """Whether any rank's answer is True."""
    return answer if communicator.current().size == 1 else bool(communicator.all_gathered(np.array(answer)).any())


def largest(number: int) -> int:
    """The largest number of all ranks."""
    return number if communicator.current().size == 1 else int(communicator.all_gathered(np.array(number)).max())


REPORT_SECONDS = 0.1
"""The approximate time between two reports of progress, and between two checks for a request to stop."""


class StepLoop:
    """Takes steps on consecutive batches; one call to the device runs many of them.

    `log` holds the metrics of the last steps. It begins again every LOG_ROWS steps.
    """

    def __init__(self, experiment: Experiment, state: TrainState, examples: Examples) -> None:
        self.step, self.experiment = experiment.logged_step, experiment
        self.state, self.log = state, empty_log(experiment.network.task, LOG_ROWS, examples.device)
        self.seed, self.examples = experiment.seed(examples.device), examples
        self.steps_per_report = 1
        self.begin(())

    def begin(self, batches: Iterable[np.ndarray]) -> None:
        """Let the next steps be on these batches. The log begins again, in the same memory."""
        self.groups = self.examples.groups(batches, LOG_ROWS, self.experiment.part)
        self.batches_left = self.steps_taken = 0

    def compile(self, sizes: Iterable[int]) -> Sequence[Executable]:
        """Begin to compile the step for batches of these sizes.

        A caller that waits for the executables (`Executable.finish`) before the first step measures no compilation.
        """
        if not isinstance(self.step, Staged):
            return ()
        groups = self.examples.groups([np.zeros(size, np.int64) for size in sizes], LOG_ROWS, self.experiment.part)
        return [self.step.compile(*self._arguments(group)) for group in groups]

    def _arguments(self, group: BatchGroup) -> tuple[Any, ...]:
        more = self.experiment.batch_arguments(group.size)
        return (self.state, self.log, self.seed, *group.inputs, *more)

    @property
    def row(self) -> int:
        """The row of the log that the next step writes."""
        return self.steps_taken % LOG_ROWS

    def steps(self, count: int) -> Iterator[tuple[int, int]]:
        """Take `count` steps, and yield (steps, images) after each call to the device.

        A caller that stops iterating takes no further steps.
        """
        while count:
            if not self.batches_left:
                self.group = next(self.groups)
                self.batches_left = self.group.steps
                if not self.group.position:  # the old numbers stay in the rows until they are written
                    first = from_numpy(np.zeros((), np.int64), self.examples.device, donated=self.log.position)
                    self.log = self.log._replace(position=first)
            before, times = perf_counter(), min(self.steps_per_report, self.batches_left, count)
            arguments = self._arguments(self.group)
            self.state, self.log = repeated(self.step, times, arguments[:2], *arguments[2:])
            found = max(1, int(REPORT_SECONDS / max((perf_counter() - before) / times, 1e-9)))
            self.steps_per_report = of_first_rank(found)
            self.steps_taken += times
            self.batches_left -= times
            count -= times
            yield times, times * self.group.size


def continuation(experiment: Experiment, state: TrainState, device: str = "cpu") -> Callable[[int], TrainState]:
    """A function for measurements: each call continues training by a number of steps and returns the new state.

    `state` is one of the whole network, as `initial_state` and `Result` have it; it is not modified. The returned state
    is this rank's part, valid until the next call. Only full batches are used, so that all steps do the same work.
    """
    examples = on_device(experiment.train, device, experiment.draws_examples)
    epochs = (batches_of(experiment, experiment.epochs + i) for i in count(1))
    full = (indices for batches in epochs for indices in batches if len(indices) == experiment.full_batch)
    own = experiment.divided(tree.map(np.asarray, state))
    loop = StepLoop(experiment, tree.map(lambda x: array(x, device=device), own), examples)
    loop.begin(full)

    def take_steps(times: int = 1) -> TrainState:
        for _ in loop.steps(times):
            pass
        return loop.state

    return take_steps


def batches_of(experiment: Experiment, epoch: int) -> Iterator[np.ndarray]:
    """The batches of an epoch (from 1) as int64 indices, in the order that the seed determines."""
    seed = experiment.config.training.seed
    size = experiment.config.data.batch_size
    return data.batches(experiment.examples_per_epoch, size, seed, epoch, experiment.order)


class FiniteCheck:
    """Whether a state on a device has only finite numbers, over all ranks. All ranks check together.

    The call starts the check, so the next step may then overwrite the state. The function that it returns waits for
    the answer.
    """

    def __init__(self, experiment: Experiment, device: str) -> None:
        self.experiment, self.device = experiment, device

    def begin_compiling(self, state: TrainState) -> None:
        """Begin to compile the check of such states."""
        if isinstance(self.experiment.finite_check, Staged):
            self.experiment.finite_check.compile(state)

    def __call__(self, state: TrainState) -> Callable[[], bool]:
        if self.device == "cpu":  # NumPy needs no Program, which would take seconds to compile
            numbers = tree.leaves(self.experiment.without_padding(state))
            found = all(np.isfinite(x.numpy()).all() for x in numbers)
            return lambda: not any_rank(not found)
        wait = self.experiment.finite_check(state).fetch()
        return lambda: not any_rank(not wait())


RESULT = {"forward": "result", "backward": "gradient", "update": "update"}

CAUSES: dict[str, tuple[Callable[..., Any], str]] = {
    "div": (lambda x, y: y == 0, "a divisor is 0, add a small number to it"),
    "reciprocal": (lambda x: x == 0, "a divisor is 0, add a small number to it"),
    "rsqrt": (lambda x: x <= 0, "rsqrt needs numbers above 0, add a small number to its operand"),
    "sqrt": (lambda x: x < 0, "sqrt needs numbers of at least 0"),
    "log": (lambda x: x <= 0, "log needs numbers above 0, add a small number, or use a loss that takes logits"),
    "power_scalar": (lambda x: x <= 0, "a power needs a base above 0, unless the exponent is a positive integer"),
    "power": (lambda x, y: x <= 0, "a power needs a base above 0, unless the exponent is a positive integer"),
    "exp": (lambda x: x > np.log(np.finfo(x.dtype).max), "exp overflows, subtract the largest number, as softmax does"),
}
"""What makes the result of an operation infinite or NaN, as a condition on its operands, and what to do."""

ADVICE = "lower the optimizer's lr, or set training.clip_norm"


class _FirstNotFinite(EvaluationTrace):
    """Runs operations and records the first one whose result is not finite.

    Attributes:
        found: the operation, its layer and its operands, and what to do; empty before.
    """

    found = ""

    def __init__(self, names: Mapping[int, str]) -> None:
        """`names` are those of arrays, by their id."""
        self.names = names

    def process(self, primitive: Primitive, args: Sequence[Value], params: Mapping[str, Any]) -> Any:
        results = super().process(primitive, args, params)
        if not self.found:
            for x in (results,) if isinstance(results, Value) else results:
                if not np.isfinite(x.numpy()).all():
                    part = f" in {current_scope()}" if current_scope() else ""
                    operands = " and ".join(map(self._described, args))
                    where = f"the {RESULT[current_phase()]} of {primitive.name}{part}, from {operands}"
                    self.found = f", first {where}; training stopped: {_advice(primitive, args)}"
        return results

    def _described(self, x: Value) -> str:
        """Name, shape, and least and largest number."""
        numbers, name = x.numpy(), self.names.get(id(x), "")
        shape = f"{len(x)} numbers" if x.ndim == 1 else "x".join(map(str, x.shape)) or "a number"
        interval = f"{numbers.min():.3g} to {numbers.max():.3g}" if numbers.size else "empty"
        return f"{name} {shape} ({interval})".lstrip()


def _advice(primitive: Primitive, args: Sequence[Value]) -> str:
    """What to do about an operation whose result on these operands is not finite."""
    holds, cause = CAUSES.get(primitive.name, (lambda *_: False, ""))
    return f"{cause}; or {ADVICE}" if np.any(holds(*(x.numpy() for x in args))) else ADVICE


def not_finite_message(
    experiment: Experiment, state: TrainState, examples: Examples, batch: np.ndarray, before: Progress, loss: float
) -> str:
    """The error message for a step on `batch` that made the finite `state` non-finite.

    Repeats the step one operation at a time to find the first one that overflows. Sums are then computed in another
    order, which may not overflow near the limit of the dtype; in that case the message names no operation.
    """
    names = zip(tree.leaves(state.params), tree.paths(state.params), strict=True)
    trace = _FirstNotFinite({id(x): path for x, path in names})
    with base_trace(trace):
        inputs = examples.batches(experiment.part(batch))
        seed, size = experiment.seed(examples.device), experiment.batch_arguments(len(batch))
        experiment.eager_step(state, seed, *inputs, *size)
    what = "a number of the new state is not finite" if math.isfinite(loss) else f"the loss is {loss}"
    where = next(filter(None, communicator.gathered_texts(trace.found)), f"; training stopped: {ADVICE}")
    return f"{what} at step {before.step + 1} (epoch {before.epoch}){where}"
