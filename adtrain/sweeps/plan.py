"""The plan of a sweep: the waves of each group, their memory, and the time that they are predicted to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from time import perf_counter
from typing import Any

import numpy as np

from adtrain.core import tree
from adtrain.core.array import Array, Placeholder, array, from_numpy
from adtrain.core.backend import backend
from adtrain.core.errors import OutOfMemory
from adtrain.core.kernel import MAX_GRID
from adtrain.data.memory import machine_memory
from adtrain.sweeps.members import Group
from adtrain.sweeps.step import Settings, empty_tally, zero_member_totals
from adtrain.sweeps.wave import Programs
from adtrain.training.evaluation import BATCH_SIZE
from adtrain.training.examples import held_bytes
from adtrain.training.experiment import LOG_ROWS
from adtrain.training.memory import nbytes

MEMORY_SHARE = 0.8
"""The share of the device's memory, or of the host's for the CPU, that a wave may take."""
MAX_WAVE = MAX_GRID[1]
"""Maximum of members of a wave: they are dimension y of the grid of a kernel."""
MEASURED_STEPS = 10
"""Steps of a measurement: as many as one CUDA graph has, or one launch of `resident_steps`."""
ENOUGH_SECONDS = 0.1
"""A measurement that took this long is not repeated."""
MOST_TOGETHER = 8
"""The most groups that are trained side by side: the default of CUDA_DEVICE_MAX_CONNECTIONS, 8 queues."""


@dataclass(frozen=True)
class GroupPlan:
    """What is known of a group before it is trained.

    Attributes:
        waves: the number of members in each wave.
        parameters: of one member.
        bytes: the planned peak of the largest wave on the device, with the data.
        step_seconds: the measured time of a step of the largest wave; None if it was not measured.
        steps: of each member, without halving.
    """

    group: Group
    waves: tuple[int, ...]
    parameters: int
    bytes: int
    steps: int
    step_seconds: float | None = None

    @property
    def seconds(self) -> float | None:
        """The predicted time of training without evaluation and halving; None if no step was measured."""
        if self.step_seconds is None:
            return None
        return self.step_seconds * self.steps * sum(self.waves) / self.waves[0]


def plan(group: Group, device: str, programs: Programs, most: int | None = None) -> GroupPlan:
    """The plan of a group, with as many members in a wave as fit on the device, at most `most` and MAX_WAVE.

    Raises OutOfMemory where a single member does not fit.
    """
    experiment, total = group.experiment, len(group.members)
    state = experiment.random_initial_state("cpu")
    count = _even(total, min(total, most or total, MAX_WAVE))
    limit = _limit(device)
    needed = needed_bytes(group, device, programs, count)
    if needed > limit:
        one = needed_bytes(group, device, programs, 1)
        if one > limit:
            raise OutOfMemory(
                f"device {device}: out of memory: one member needs {one / 2**20:,.1f} MiB, "
                f"{limit / 2**20:,.1f} MiB can be used; reduce data.batch_size or the network"
            )
        low, high = 1, count
        while high - low > max(1, low // 16):
            middle = (low + high) // 2
            low, high = (middle, high) if needed_bytes(group, device, programs, middle) <= limit else (low, middle)
        count = _even(total, low)
        needed = needed_bytes(group, device, programs, count)
    sizes = tuple(min(count, total - first) for first in range(0, total, count))
    parameters = sum(prod(x.shape) for x in tree.leaves(state.params))
    return GroupPlan(group, sizes, parameters, needed, experiment.total_steps)


def _even(total: int, most: int) -> int:
    """The size of the largest of as few waves as possible, of at most `most` members, whose sizes are even."""
    return -(-total // -(-total // most))


def together_of(plans: Sequence[GroupPlan], device: str) -> list[list[GroupPlan]]:
    """The plans in lists of groups that are trained side by side, because all of them fit on the device.

    On the CPU each is alone, as a Program uses all cores.
    """
    found: list[list[GroupPlan]] = []
    limit = _limit(device)
    for group_plan in plans:
        last = found[-1] if found else []
        joined = (*last, group_plan)
        alone = device == "cpu" or not last or any(len(x.waves) > 1 for x in joined)
        if alone or len(last) == MOST_TOGETHER or sum(x.bytes for x in joined) > limit:
            found.append([group_plan])
        else:
            last.append(group_plan)
    return found


def needed_bytes(group: Group, device: str, programs: Programs, count: int) -> int:
    """The planned peak of a wave of `count` members, in a step on a full batch or in an evaluation, with the data."""
    experiment = group.experiment
    arguments = step_arguments(group, count)

    def on_device(x: Any) -> Placeholder:
        return Placeholder(x.shape, x.dtype, device)

    program = programs.step.program(*tree.map(on_device, arguments))
    evaluation = programs.evaluation.program(*tree.map(on_device, _evaluation_arguments(group, arguments[0], count)))
    memories = [backend(device).memory(x) for x in (program, evaluation)]
    largest = max(memory.values + memory.scratch for memory in memories)
    inputs = sum(nbytes(x) for x in arguments[:3]) + nbytes(arguments[5])
    inputs += nbytes(arguments[0])  # the state after the last epoch: see `WaveTraining.last`
    data = held_bytes(group.whole, device) + held_bytes(experiment.test, device)
    return inputs + data + largest


def measured(found: GroupPlan, device: str, programs: Programs) -> GroupPlan:
    """The plan with the time of a step, measured on a few steps of the largest wave from states of zeros."""
    state, *others = step_arguments(found.group, found.waves[0])
    zeros = tree.map(lambda x: np.zeros(x.shape, x.dtype), state)  # they take no memory until they are written
    arguments = tree.map(lambda x: from_numpy(np.asarray(x), device), (zeros, *others))
    carry: tuple[Any, ...] = arguments[:2]
    seconds = []
    for times in (1, 1, MEASURED_STEPS, MEASURED_STEPS):  # the first one compiles
        carry = (carry[0], carry[1]._replace(position=array(np.int64(0), device=device)))
        started = perf_counter()
        carry = programs.step.repeat(times, *carry, *arguments[2:])
        backend(device).synchronize()
        seconds.append((perf_counter() - started) / times)
        if len(seconds) > 1 and seconds[-1] * times > ENOUGH_SECONDS:
            break
    return replace(found, step_seconds=min(seconds[1:]))


def step_arguments(group: Group, count: int) -> tuple[Any, ...]:
    """Arguments of the step for `count` members, as NumPy arrays of the right types; most are views of zeros."""
    experiment = group.experiment
    whole, size = group.whole, experiment.full_batch

    def repeated(x: Array) -> np.ndarray:
        return np.broadcast_to(x.numpy(), (count, *x.shape))

    options: dict[str, Any] = {}
    for name in group.options:
        value = getattr(experiment.optimizer, name)
        values = value if isinstance(value, tuple) else (value,)
        arrays = [np.full(count, x, np.float64) for x in values]
        options[name] = arrays if isinstance(value, tuple) else arrays[0]
    members = () if group.shared_seed is not None else (count,)
    return (
        tree.map(repeated, experiment.random_initial_state("cpu")),
        tree.map(lambda x: x.numpy(), empty_tally(experiment.network.task, count, "cpu")),
        Settings(np.zeros((count, 2), np.uint32), np.zeros((count, LOG_ROWS)), options),  # type: ignore[arg-type]
        np.asarray(whole.images),
        whole.labels,
        np.broadcast_to(np.int64(0), (*members, LOG_ROWS, size)),
    )


def _evaluation_arguments(group: Group, state: Any, count: int) -> tuple[Any, ...]:
    """Arguments of the evaluation of full batches of the test part for `count` members in this state."""
    test = group.experiment.test
    totals = tree.map(lambda x: x.numpy(), zero_member_totals(group.experiment.network.task, count, "cpu"))
    order = np.broadcast_to(np.int64(0), (LOG_ROWS, min(BATCH_SIZE, len(test))))
    return totals, state.params, state.statistics, test.images, test.labels, order


def _limit(device: str) -> int:
    available = backend(device).available()
    return int(MEMORY_SHARE * (machine_memory() if available is None else available))
