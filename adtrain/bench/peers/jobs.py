"""The work that is the same in each system: single operations, and the training of an experiment, of one network or of
many with other seeds.

All systems start from the same weights and use the same batches. A step gathers its batch from the images, uint8 or
float32, in the device's memory, normalises it, and runs forward pass, loss, backward pass, clipping and an update at a
constant rate. The host waits for the device only when it reads the loss of the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np

from adtrain import config, data, nn, ops, optim, training
from adtrain.bench.op_table import OpCase, cases
from adtrain.bench.peers.systems import ADTRAIN, Unsupported, Work, made
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.core.autodiff import vjp
from adtrain.nn.describe import layers
from adtrain.sweeps.members import Group, groups_of, members_of

CHUNK = {"cpu": 5, "gpu": 20}
"""Steps in one call, by device."""

CHUNKS = 20
"""Calls with different batches; after them the same batches repeat."""

COMPARED, COMPARED_WITH_MUON = 5, 3
"""Numbers of first steps whose losses are compared before timing. A step of Muon makes differences of rounding, and of
which one of equal pixels is a maximum, about ten times as large."""


class Runner(NamedTuple):
    """A system's training.

    Attributes:
        losses: makes one call, and returns the loss of each of its steps; of many networks a list for each step.
        run: makes the given number of calls, waits for the device, and returns the loss of the last step, or a mean.
    """

    losses: Callable[[], Sequence[Any]]
    run: Callable[[int], float]


class Checked(NamedTuple):
    """The seconds of training until the end of an epoch, and the test accuracy there."""

    seconds: float
    accuracy: float


@dataclass(frozen=True)
class Job:
    """The input of every system."""

    experiment: training.Experiment
    device: str

    @cached_property
    def orders(self) -> np.ndarray:
        """Indices of batches: int64 (CHUNKS, CHUNK, batch)."""
        size, chunk = self.experiment.full_batch, CHUNK[self.device]
        return np.stack(list(islice(self._batches(0), CHUNKS * chunk))).reshape(CHUNKS, chunk, size)

    def _batches(self, seed: int) -> Iterator[np.ndarray]:
        """The indices of full batches, epoch after epoch."""
        size = self.experiment.full_batch
        epochs = (data.batches(len(self.experiment.train), size, seed, epoch) for epoch in count(1))
        return (batch for epoch in epochs for batch in epoch if len(batch) == size)

    @property
    def compared(self) -> int:
        """The number of first steps whose losses are compared."""
        rule = self.experiment.optimizer
        rule = rule.rule if isinstance(rule, optim.Grouped) else rule
        return COMPARED_WITH_MUON if isinstance(rule, optim.Muon) else COMPARED

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """The parameters before the first step, by dotted path: "0.weight"."""
        return by_path(self.experiment.initial_state("cpu").params)

    @cached_property
    def statistics(self) -> dict[str, np.ndarray]:
        """The running statistics before the first step, by dotted path: "1.running_mean"."""
        return by_path(self.experiment.initial_state("cpu").statistics)

    @cached_property
    def normalization(self) -> Sequence[np.ndarray]:
        """Scale and shift (C, 1, 1) that normalise pixels, in the network's dtype: pixel * scale + shift."""
        return self.experiment.network.normalization()


def by_path(arrays: Any) -> dict[str, np.ndarray]:
    """The arrays of a tree by dotted path."""
    leaves = zip(tree.paths(arrays), tree.leaves(arrays), strict=True)
    return {path: np.array(x if isinstance(x, np.ndarray) else x.numpy()) for path, x in leaves}


def runner(name: str, job: Job, work: Work = "steps") -> Runner:
    """The training of a system: of one network, or of many if `work` is "members" and `job` a `MembersJob`.

    Raises:
        Unsupported: it has no counterpart of something in the job.
    """
    experiment, network = job.experiment, job.experiment.network
    parts = [layer for _, layer, _ in layers(network.model, network.input_shape)]
    drops = any(x.p if isinstance(x, nn.Dropout) else getattr(x, "dropout", 0) for x in parts)
    separate = experiment.config.data.options.documents == "separate"
    for found, reason in (
        (drops, "dropout draws other random numbers (set it to 0 to compare)"),
        (experiment.average is not None, "no counterpart of an average of the weights (training.average)"),
        (experiment.data.targets, "no counterpart of numbers to predict (data.target)"),
        (separate, "no counterpart of separate documents (data.documents)"),
    ):
        if found and name != ADTRAIN:
            raise Unsupported(reason)
    ready: Runner = made(name, work, job)
    return ready


@dataclass(frozen=True)
class MembersJob(Job):
    """The input of every system. All arrays have a leading axis of members.

    Attributes:
        group: the members; `experiment` is that of the first one.
    """

    group: Group

    @property
    def count(self) -> int:
        return len(self.group.members)

    @cached_property
    def orders(self) -> np.ndarray:
        """Indices of batches: int64 (CHUNKS, CHUNK, members, batch)."""
        size, steps = self.experiment.full_batch, CHUNKS * CHUNK[self.device]
        found = np.empty((steps, self.count, size), np.int64)
        for i, member in enumerate(self.group.members):
            found[:, i] = list(islice(self._batches(self.group.data_seed(member)), steps))
        return found.reshape(CHUNKS, CHUNK[self.device], self.count, size)

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        return by_path(self.initial_state.params)

    @cached_property
    def statistics(self) -> dict[str, np.ndarray]:
        return by_path(self.initial_state.statistics)

    @cached_property
    def initial_state(self) -> training.TrainState:
        """The states of all members before the first step, as NumPy arrays."""
        states = [self.group.of_member(member).initial_state("cpu") for member in self.group.members]
        return tree.map(lambda *xs: np.stack([x.numpy() for x in xs]), *states)


def members_job(cfg: config.Config, device: str) -> MembersJob:
    """The members of a config with a section `sweep`, which are one group."""
    (group,) = groups_of(cfg, members_of(cfg))
    return MembersJob(group.experiment, device, group)


REPEATS = 10
"""Runs of an operation in one call."""

CHECKED_ITEMS = 4
"""Items (rows, images) of a result that are compared with float64, where items are independent."""


class OpRunner(NamedTuple):
    """A system's operation.

    Attributes:
        run: makes the given number of calls of REPEATS runs, waits for the device, returns one element of the result.
        results: the arrays that one run returns: the output, or the gradients of the floating-point inputs. In phase
            "backward" it takes another cotangent as an optional argument.
    """

    run: Callable[[int], float]
    results: Callable[..., list[np.ndarray]]


def case_of(name: str, device: str) -> OpCase:
    """The case of that name."""
    return next(case for case in cases(device) if case.name == name)


def operation_error(case: OpCase, phase: str, runner: OpRunner) -> float:
    """The relative error of a result: norm of its difference from the NumPy reference in float64, over the norm of the
    reference. Of several gradients, the largest error.

    Where the items of a batch are independent, only the first CHECKED_ITEMS are checked. The cotangent is then 0 for
    all other items, so that the gradient of a weight is still checked in every element.
    """
    count = CHECKED_ITEMS if case.by_item else None
    inputs = [x[:count] if i in case.by_item else x for i, x in enumerate(case.arrays())]
    exact = [array(x.astype(np.float64) if x.dtype.kind == "f" else x) for x in inputs]
    if phase == "forward":
        expected = [case.of(ops)(*exact).numpy()]
        results = [x[:count] if count else x for x in runner.results()]
    else:
        cotangent = case.cotangent()
        if count:
            cotangent[count:] = 0
        _, pullback = vjp(lambda *floats: case.of(ops)(*case.with_indices(exact, floats)), *case.floats(exact))
        exact_cotangent = (cotangent[:count] if count else cotangent).astype(np.float64)
        expected = [x.numpy() for x in pullback(array(exact_cotangent))]
        results = runner.results(cotangent)
        results = [x[: len(y)] if x.shape != y.shape else x for x, y in zip(results, expected, strict=True)]
    return max(map(_relative_error, results, expected))


def _relative_error(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found - exact)) / max(float(np.linalg.norm(exact)), 1e-30)
