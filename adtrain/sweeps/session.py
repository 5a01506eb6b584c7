"""A sweep that is ready to run: its members, groups, Programs and plans, with their memory and predicted times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from adtrain import config
from adtrain.config import Config
from adtrain.config.plugged import Trust
from adtrain.config.problems import found
from adtrain.core import tree
from adtrain.core.array import Array, Placeholder, array, from_numpy
from adtrain.core.backend import backend
from adtrain.core.errors import OutOfMemory
from adtrain.core.kernel import MAX_GRID
from adtrain.data import Split
from adtrain.data.file_array import machine_memory
from adtrain.sweeps.folder import SweepFolder
from adtrain.sweeps.members import Group, Member, groups_of, members_of
from adtrain.sweeps.records import LAST_EPOCH_FORMAT, SweepOptions
from adtrain.sweeps.step import Settings, empty_tally, zero_member_totals
from adtrain.training.checks import check_precision, other_metrics
from adtrain.training.costs import tree_bytes
from adtrain.training.evaluation import batch_size_of
from adtrain.training.examples import held_bytes
from adtrain.training.experiment import LOG_ROWS

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


def plan(group: Group, device: str, most: int | None = None) -> GroupPlan:
    """The plan of a group, with as many members in a wave as fit on the device, at most `most` and MAX_WAVE.

    Raises OutOfMemory where a single member does not fit.
    """
    experiment, total = group.experiment, len(group.members)
    count = _even(total, min(total, most or total, MAX_WAVE))
    limit = _limit(device)
    needed = needed_bytes(group, device, count)
    if needed > limit:
        one = needed_bytes(group, device, 1)
        if one > limit:
            raise OutOfMemory(
                f"device {device}: out of memory: one member needs {one / 2**20:,.1f} MiB, "
                f"{limit / 2**20:,.1f} MiB can be used; reduce data.batch_size or the network"
            )
        low, high = 1, count
        while high - low > max(1, low // 16):
            middle = (low + high) // 2
            low, high = (middle, high) if needed_bytes(group, device, middle) <= limit else (low, middle)
        count = _even(total, low)
        needed = needed_bytes(group, device, count)
    sizes = tuple(min(count, total - first) for first in range(0, total, count))
    parameters = sum(prod(x.shape) for x in tree.leaves(experiment.state_types.params))
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


def needed_bytes(group: Group, device: str, count: int) -> int:
    """The planned peak of a wave of `count` members, in a step on a full batch or in an evaluation, with the data."""
    experiment = group.experiment
    arguments = step_arguments(group, count)

    def on_device(x: Any) -> Placeholder:
        return Placeholder(x.shape, x.dtype, device)

    evaluated = _evaluation_arguments(group, arguments[0], count)
    steps = (group.programs.step, arguments), (group.programs.evaluation, evaluated)
    memories = [backend(device).memory(step.program(*tree.map(on_device, given))) for step, given in steps]
    largest = max(memory.values + memory.scratch for memory in memories)
    inputs = sum(tree_bytes(x) for x in arguments[:3]) + tree_bytes(arguments[5])
    inputs += (1 + experiment.restores_best) * tree_bytes(arguments[0])  # `WaveTraining.last` and `best`
    data = held_bytes(group.whole, device) + held_bytes(experiment.test, device)
    return inputs + data + largest


def measured(found: GroupPlan, device: str) -> GroupPlan:
    """The plan with the time of a step, measured on a few steps of the largest wave from states of zeros."""
    state, *others = step_arguments(found.group, found.waves[0])
    zeros = tree.map(lambda x: np.zeros(x.shape, x.dtype), state)  # they take no memory until they are written
    arguments = tree.map(lambda x: from_numpy(np.asarray(x), device), (zeros, *others))
    carry: tuple[Any, ...] = arguments[:2]
    seconds = []
    for times in (1, 1, MEASURED_STEPS, MEASURED_STEPS):  # the first one compiles
        carry = (carry[0], carry[1]._replace(position=array(np.int64(0), device=device)))
        started = perf_counter()
        carry = found.group.programs.step.repeat(times, *carry, *arguments[2:])
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
        value = experiment.optimizer.numbers()[name]
        values = value if isinstance(value, tuple) else (value,)
        arrays = [np.full(count, x, np.float64) for x in values]
        options[name] = arrays if isinstance(value, tuple) else arrays[0]
    members = () if group.shared_seed is not None else (count,)
    seeds, factors = np.zeros((count, 2), np.uint32), np.zeros((count, LOG_ROWS))
    return (
        tree.map(repeated, experiment.random_initial_state("cpu")),
        tree.map(lambda x: x.numpy(), empty_tally(experiment.network.task, count, "cpu")),
        Settings(seeds, factors, options, _target_statistics(group, count)),  # type: ignore[arg-type]
        np.asarray(whole.images),
        whole.labels,
        np.broadcast_to(np.int64(0), (*members, LOG_ROWS, size)),
    )


def _target_statistics(group: Group, count: int) -> list[Any]:
    """`Settings.targets` of `count` members."""
    data = group.experiment.data
    statistics = [data.target_mean, data.target_std] if group.has_own_targets else []
    return [np.tile(np.array(x), (count, 1)) for x in statistics]


def _evaluation_arguments(group: Group, state: Any, count: int) -> tuple[Any, ...]:
    """Arguments of the evaluation of full batches of the test part for `count` members in this state."""
    test = group.experiment.test
    task = group.experiment.network.task
    totals = tree.map(lambda x: x.numpy(), zero_member_totals(task, count, "cpu"))
    order = np.broadcast_to(np.int64(0), (LOG_ROWS, min(batch_size_of(task), len(test))))
    return totals, state.params, state.statistics, test.images, test.labels, order, _target_statistics(group, count)


def _limit(device: str) -> int:
    available = backend(device).available()
    return int(MEMORY_SHARE * (machine_memory() if available is None else available))


@dataclass(frozen=True)
class Session:
    """A sweep that is ready to run. Made by `prepared`."""

    config: Config
    members: Sequence[Member]
    groups: Sequence[Group]
    device: str

    def plans(self, most: int | None = None) -> list[GroupPlan]:
        """The plan of each group, with at most `most` members in a wave. Raises OutOfMemory."""
        return [plan(group, self.device, most) for group in self.groups]

    @property
    def digests(self) -> dict[str, str]:
        """The digests of the data of all groups; data that several groups have are named after the first one."""
        found: dict[str, str] = {}
        seen: list[Split] = []
        for group in self.groups:
            if not any(group.whole is split for split in seen):
                seen.append(group.whole)
                parts = {"training": group.whole, "test": group.experiment.test}
                for part, split in parts.items():
                    found |= {f"{part} {name} of group {group.number}": x for name, x in split.digests.items()}
        return found

    def measured(self, plans: Sequence[GroupPlan]) -> list[GroupPlan]:
        """The plans with measured times. Compiles the Programs."""
        return [measured(x, self.device) for x in plans]

    def lacks(self, rank_by: str) -> str | None:
        """What is wrong with a metric that some members do not have; None where all have it."""
        part, _, metric = rank_by.partition("_")
        for group in self.groups:
            task = group.experiment.network.task
            fields, others = task.score_kind._fields, other_metrics(group.experiment.config, task)
            in_part = (*fields, *others) if part in ("validation", "test") else fields if part == "train" else ()
            if metric not in in_part:
                expected = f"expected train_, validation_ or test_ with one of {', '.join(fields)}"
                expected += f", or validation_ or test_ with one of {', '.join(others)}" if others else ""
                return f"found {found(rank_by)}, {expected}"
            if part == "validation" and group.experiment.validation is None:
                return f"found {rank_by}, expected data.validation above 0 for it"
        return None

    def options(self, halving: bool, rank_by: str | None) -> SweepOptions:
        """The options of a new sweep. Raises ConfigError where the members do not have the metric."""
        chosen = rank_by or config.build.sweep(self.config).rank_by or self.groups[0].experiment.best_by
        if (wrong := self.lacks(chosen)) is not None:
            raise self.config.error_at(("sweep", "rank_by"), wrong)
        criterion = self.groups[0].criterion(chosen)
        if halving and (wrong := self.lacks(str(self.groups[0].halving_criterion(criterion)))) is not None:
            raise self.config.error_at(("sweep", "rank_by"), f"{wrong}, by which members are dropped")
        epochs = max(group.experiment.epochs for group in self.groups)
        return SweepOptions(halving_epochs(epochs, len(self.members)) if halving else (), chosen)


def halving_epochs(epochs: int, members: int) -> tuple[int, ...]:
    """The epochs after which the worse half is dropped: after 1, 2, 4, ... epochs, while two members or more are left.

    Successive halving (Jamieson and Talwalkar, 2016) with a factor of 2.
    """
    found: list[int] = []
    epoch = 1
    while epoch < epochs and members > 1:
        found.append(epoch)
        members = -(-members // 2)
        epoch *= 2
    assert all(a < b for a, b in pairwise(found))
    return tuple(found)


def prepared(cfg: Config, device: str, first_targets: bool = False) -> Session:
    """The sweep of a config: members are checked, data are read, nothing is compiled.

    `first_targets` is that of `Group`. Raises ConfigError and DataError.
    """
    members = members_of(cfg)
    for member in members:
        check_precision(member.config, device)
    return Session(cfg, members, groups_of(cfg, members, first_targets), device)


def reopened(path: Path, device: str, trust: Trust) -> tuple[Session, SweepFolder]:
    """The sweep in a folder. Raises AdtrainError where it is none, and as `SweepFolder.config` and `prepared` do."""
    folder = SweepFolder.open(path)
    return prepared(folder.config(trust), device, folder.options.format == LAST_EPOCH_FORMAT), folder


def described(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """What sets each group apart: keys with one value in all of its members, but not the same in all groups."""
    values = [
        {key: [member.values[key] for member in group.members] for key in group.members[0].values} for group in groups
    ]
    constant = [{key: xs[0] for key, xs in of_group.items() if all(x == xs[0] for x in xs)} for of_group in values]
    return [
        {key: x for key, x in of_group.items() if not all(key in other and other[key] == x for other in constant)}
        for of_group in constant
    ]
