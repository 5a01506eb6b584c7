"""Programs by NumPy: the references of the equations in sequence, looked up beforehand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np

from adtrain.core.backend import KernelRun, Memory
from adtrain.core.errors import ShapeError
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.types import ArrayType


class NumpyProgram:
    """A Program as a list of steps on numbered slots. A slot is cleared after its last use."""

    repeats = False

    def __init__(self, program: Program) -> None:
        self.memory = memory(program)
        self.kernels: Sequence[Sequence[KernelRun]] = [
            [] if e.primitive.view else [KernelRun("NumPy", {})] for e in program.equations
        ]
        slots = {v: i for i, v in enumerate(program.names)}
        self.steps = [
            (
                e.primitive.name,
                e.primitive.reference,
                tuple(slots[v] for v in e.inputs),
                dict(e.params),
                tuple((slots[v], v.type) for v in e.outputs),
                tuple(slots[v] for v in dead),
            )
            for e, dead in zip(program.equations, program.last_uses(), strict=True)
        ]
        self.inputs = [slots[v] for v in program.inputs]
        self.outputs = [slots[v] for v in program.outputs]
        self.initial: list[Any] = [None] * len(slots)
        for v, x in program.constants.items():
            self.initial[slots[v]] = x.buffer

    @property
    def lowered(self) -> None:
        return None

    @property
    def ready(self) -> bool:
        return True

    def finish(self) -> None:
        """Returns at once: nothing is compiled later."""

    def run(
        self, buffers: list[np.ndarray], timed: bool = False, times: int = 1
    ) -> tuple[Sequence[np.ndarray], Sequence[float]]:
        assert times == 1, "every run returns arrays of its own"
        slots = self.initial.copy()
        for slot, buffer in zip(self.inputs, buffers, strict=True):
            slots[slot] = buffer
        marks = [perf_counter()]
        with np.errstate(all="ignore"):
            for name, function, inputs, params, outputs, dead in self.steps:
                found = function(*[slots[i] for i in inputs], **params)
                if len(outputs) == 1:
                    ((slot, output),) = outputs
                    slots[slot] = as_declared(name, found, output)
                else:
                    for x, (slot, output) in zip(found, outputs, strict=True):
                        slots[slot] = as_declared(name, x, output)
                for slot in dead:
                    slots[slot] = None
                if timed:
                    marks.append(perf_counter())
        return [slots[i] for i in self.outputs], [b - a for a, b in pairwise(marks)]


def memory(program: Program) -> Memory:
    """The memory of a NumpyProgram: each value lives from its equation to the last use of it or of its views.

    What a NumPy function allocates inside is not known and not counted.
    """
    shown: dict[Variable, Variable] = {}  # a value computed here, or a view: the value that owns its memory
    holders: Counter[Variable] = Counter()
    constants = sum(v.nbytes for v in program.constants)
    alive = most = separate = 0
    for e, dead in zip(program.equations, program.last_uses(), strict=True):
        inside = _inside(e)
        for v in e.outputs:
            if not e.primitive.view:
                shown[v] = v
                alive += v.nbytes
                separate += v.nbytes
            elif e.inputs and e.inputs[0] in shown:
                shown[v] = shown[e.inputs[0]]
            if v in shown:
                holders[shown[v]] += 1
        most, separate = max(most, alive + inside), separate + inside
        for v in dead:
            if v in shown:
                holders[shown[v]] -= 1
                alive -= 0 if holders[shown[v]] else shown[v].nbytes
    return Memory(most + constants, separate + constants, 0)


def _inside(equation: Equation) -> int:
    """Bytes of what a fused equation's members hand on; their references keep it until the equation ends."""
    if not equation.form:
        return 0
    body: Program = equation.params["body"]
    made = {v for e in body.equations if not e.primitive.view for v in e.outputs}
    return sum(v.nbytes for v in made - set(body.outputs)) + max(map(_inside, body.equations), default=0)


def as_declared(name: str, x: Any, output: ArrayType) -> np.ndarray:
    """The result in C order. Raises ShapeError where the NumPy reference and the shape rule disagree."""
    x = np.asarray(x)
    if x.shape != output.shape or x.dtype != output.dtype:
        raise ShapeError(f"{name}: NumPy gave {x.dtype}{list(x.shape)}, the shape rule {output}")
    # A broadcast stays a view with stride 0: readers read its few elements.
    return x if x.flags.c_contiguous or 0 in x.strides else np.ascontiguousarray(x)
