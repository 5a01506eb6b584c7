"""The costs of a training step, computed from its Program without running it: FLOPs, bytes moved, and memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from adtrain import nn
from adtrain.core.backend import backend
from adtrain.core.costs import costs
from adtrain.core.primitive import Cost
from adtrain.core.program import Equation, Program
from adtrain.passes import SIMPLIFY, fuse
from adtrain.passes.places import nbytes
from adtrain.training.experiment import Experiment, Mode
from adtrain.training.memory import StepMemory, step_memory

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
    memory = step_memory(experiment, backend(device).memory(fused), sum(map(nbytes, made)), device)
    return StepCosts(_layers(experiment, work), phases, _total(_work(fused)), memory)


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
