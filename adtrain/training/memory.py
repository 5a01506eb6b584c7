"""The memory of a training process, computed from the step's Program without running it."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np

from adtrain.core import tree
from adtrain.core.array import Value
from adtrain.core.backend import Memory, backend
from adtrain.core.errors import OutOfMemory
from adtrain.training.examples import held_bytes
from adtrain.training.experiment import Experiment


class StepMemory(NamedTuple):
    """Bytes of all arrays in a process that takes steps on full batches, without those of evaluation."""

    parameters: int
    statistics: int
    optimizer: int
    data: int  # images and labels for training, validation and test; two chunks for a streamed split
    values: int  # values of the fused Program, placed by the memory plan
    separate_values: int  # the same values without sharing memory
    unfused_values: int  # values of the Program before fusion, without sharing memory
    scratch: int  # scratch memory of the threads

    @property
    def resident(self) -> int:
        """Bytes that stay allocated between two steps."""
        return self.parameters + self.statistics + self.optimizer + self.data

    @property
    def peak(self) -> int:
        """The planned maximum at any time."""
        return self.resident + self.values + self.scratch

    @property
    def separate_peak(self) -> int:
        """The peak without the memory plan."""
        return self.resident + self.separate_values + self.scratch

    @property
    def unfused_peak(self) -> int:
        """The peak without fusion and without the memory plan."""
        return self.resident + self.unfused_values


def step_memory(experiment: Experiment, needed: Memory, unfused_values: int, device: str) -> StepMemory:
    """The memory of `experiment`'s step on `device`. `needed` is that of its Program."""
    state = experiment.state_types
    splits = [split for split in (experiment.train, experiment.validation, experiment.test) if split is not None]
    return StepMemory(
        parameters=nbytes(state.params),
        statistics=nbytes(state.statistics),
        optimizer=nbytes(state.optimizer),
        data=sum(held_bytes(split, device) for split in splits),
        values=needed.values,
        separate_values=needed.separate,
        unfused_values=unfused_values,
        scratch=needed.scratch,
    )


def planned_peak(experiment: Experiment, device: str) -> int:
    """`StepMemory.peak` of `experiment`'s step on `device`. A step that was compiled is not traced again."""
    executable = experiment.compiled_step(device)
    needed = executable.memory if executable is not None else backend(device).memory(experiment.step_program(device))
    return step_memory(experiment, needed, needed.separate, device).peak


def too_large(experiment: Experiment, device: str) -> OutOfMemory | None:
    """The error for a step that does not fit on `device`, with a batch size that fits; None if the step fits."""
    limit, size = backend(device).available(), experiment.full_batch
    if limit is None or (needed := _needed(experiment, device, size)) <= limit:
        return None
    most = size // 2
    while most and _needed(experiment, device, most) > limit:
        most //= 2
    advice = f"data.batch_size {most} fits" if most else "no batch size fits: make the network smaller"
    return OutOfMemory(
        f"device {device}: out of memory: a step on {size:,} examples needs {needed / 2**20:,.1f} MiB, "
        f"{limit / 2**20:,.1f} MiB free; {advice}"
    )


def _needed(experiment: Experiment, device: str, batch_size: int) -> int:
    data = experiment.config.data.model_copy(update={"batch_size": batch_size})
    smaller = replace(experiment, config=experiment.config.model_copy(update={"data": data}))
    return planned_peak(smaller, device)


def nbytes(values: object) -> int:
    """The bytes of the arrays in a tree."""
    leaves: list[Value | np.ndarray] = tree.leaves(values)
    return sum(prod(x.shape) * x.dtype.itemsize for x in leaves)
