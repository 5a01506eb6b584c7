"""The costs of a training step, computed from its Program without running it: FLOPs, bytes moved, and memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from adtrain import nn
from adtrain.core import tree
from adtrain.core.array import Value
from adtrain.core.backend import Memory, backend
from adtrain.core.errors import OutOfMemory
from adtrain.core.primitive import Cost
from adtrain.core.program import Equation, Program, costs
from adtrain.core.staging import Staged
from adtrain.passes import SIMPLIFY, fuse
from adtrain.text import mebibytes
from adtrain.training.examples import held_bytes
from adtrain.training.experiment import Experiment, Mode


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
        parameters=tree_bytes(state.params),
        statistics=tree_bytes(state.statistics),
        optimizer=tree_bytes(state.optimizer),
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
        f"device {device}: out of memory: a step on {size:,} examples needs {mebibytes(needed)}, "
        f"{mebibytes(limit)} free; {advice}"
    )


def largest_batch(experiment: Experiment, device: str, limit: int) -> int:
    """The largest batch size whose planned memory fits into `limit` bytes, at most all examples, in two digits; 0 if
    none fits.

    The memory of a step is nearly linear in the batch size. So it is planned for a few sizes only.
    """
    shards, examples, size = experiment.config.data.shards or 1, len(experiment.train), experiment.full_batch
    most = examples - examples % shards
    if _needed(experiment, device, most) <= limit:
        return most
    half = size // 2 - size // 2 % shards or size
    few, many = (_needed(experiment, device, n) for n in (half, size))
    found = min(most, size + (limit - many) * (size - half) // max(many - few, 1))
    while found > 0:
        found = int(float(f"{found:.1e}")) if found >= 100 else found
        found -= found % shards
        if found and _needed(experiment, device, found) <= limit:
            return found
        found = found * 9 // 10
    return 0


def _needed(experiment: Experiment, device: str, batch_size: int) -> int:
    config = experiment.config.changed("data", batch_size=batch_size)
    return planned_peak(replace(experiment, config=config), device)


def tree_bytes(values: object) -> int:
    """The bytes of the arrays in a tree."""
    leaves: list[Value | np.ndarray] = tree.leaves(values)
    return sum(prod(x.shape) * x.dtype.itemsize for x in leaves)


PHASES = ("forward", "backward", "update")
# Parts of the step that run before the first layer; all other parts that are not layers run after the last one.
BEFORE = ("random", "input", "augment")

Work: TypeAlias = Iterable[tuple[Equation, Cost]]


class Total(NamedTuple):
    """A number of equations and the sum of their costs."""

    equations: int
    flops: int
    bytes: int


class LayerCost(NamedTuple):
    """The work in one step of a layer (without its children), or of another part of the step, such as the loss.

    `output_shape` is that of one image, and empty for a part that is not a layer.
    """

    name: str
    kind: str
    output_shape: nn.Shape
    parameters: int
    forward: Total
    backward: Total


@dataclass(frozen=True)
class StepCosts:
    """The costs of one step on a full batch.

    Attributes:
        layers: rows in execution order. A container has a row only if it computes something itself, such as a sum; a
            part that is not a layer, only if its costs are not zero.
        phases: the costs before fusion of "forward", "backward" and "update".
        fused: the costs of all equations after fusion, as they run.
    """

    layers: Sequence[LayerCost]
    phases: Mapping[str, Total]
    fused: Total
    memory: StepMemory

    @property
    def unfused(self) -> Total:
        """The costs of all equations before fusion."""
        return Total(*map(sum, zip(*self.phases.values(), strict=True)))


def step_costs(experiment: Experiment, device: str = "cpu") -> StepCosts:
    """The costs of a step of `experiment`, which may be an `outline`. Nothing is run.

    A layer's work is counted before fusion, because a fused kernel can work for several layers.
    """
    unfused = experiment.step_program(device, SIMPLIFY)
    fused = fuse(unfused) if experiment.mode is Mode.FUSED else unfused
    work = _work(unfused)
    phases = {phase: _total((e, cost) for e, cost in work if e.phase == phase) for phase in PHASES}
    made = [v for e in unfused.equations if not e.primitive.view for v in e.outputs]
    memory = step_memory(experiment, backend(device).memory(fused), sum(v.nbytes for v in made), device)
    return StepCosts(_layers(experiment, work), phases, _total(_work(fused)), memory)


def step_flops(experiment: Experiment) -> int | None:
    """The FLOPs of a step on a full batch, as it was compiled for the training; None if it was not compiled.

    Of several ranks they are those of this one.
    """
    step = experiment.logged_step
    if not isinstance(step, Staged) or not step.compiled:
        return None
    return max(_total(_work(found.program)).flops for found in step.compiled.values())


def _work(program: Program) -> Sequence[tuple[Equation, Cost]]:
    return list(zip(program.equations, costs(program.equations), strict=True))


def _total(work: Work) -> Total:
    found = [cost for _, cost in work]
    return Total(len(found), sum(cost.flops for cost in found), sum(cost.bytes for cost in found))


def _layers(experiment: Experiment, work: Work) -> list[LayerCost]:
    by_name: defaultdict[str, defaultdict[str, list[tuple[Equation, Cost]]]] = defaultdict(lambda: defaultdict(list))
    kinds = {"loss": experiment.config.loss.kind}
    shapes: dict[str, nn.Shape] = {}
    for e, cost in work:
        if e.phase != "update":
            name, kind = nn.layer_of(e.scope)
            name = name or "step"
            by_name[name][e.phase].append((e, cost))
            if kind and e.phase == "forward":
                kinds[name], shapes[name] = kind, e.outputs[0].type.shape[1:]

    rows = nn.describe(experiment.network.model, experiment.network.input_shape)
    others = by_name.keys() - {row.name for row in rows}
    for name in sorted(others & shapes.keys(), reverse=True):  # containers, the innermost first
        last_child = max(i for i, row in enumerate(rows) if row.name.startswith(f"{name}."))
        rows.insert(last_child + 1, nn.LayerRow(name, kinds[name], shapes[name], 0))
    parts = {name: nn.LayerRow(name, kinds.get(name, ""), (), 0) for name in by_name if name in others - shapes.keys()}
    rows = [
        *(row for name, row in parts.items() if name in BEFORE),
        *rows,
        *(row for name, row in parts.items() if name not in BEFORE),
    ]
    found = [
        LayerCost(*row, _total(by_name[row.name]["forward"]), _total(by_name[row.name]["backward"])) for row in rows
    ]
    return [row for row in found if row.name not in parts or row.forward.bytes or row.backward.bytes]
