"""Programs by NumPy: the equations' implementations one after the other, with nothing looked up in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from adtrain.core.array import ArrayType
from adtrain.core.program import Program


class NumpyProgram:
    """A Program as a list of steps on numbered slots; a slot is emptied after its last use."""

    def __init__(self, program: Program) -> None:
        slots = {v: i for i, v in enumerate(program.names)}
        self.steps = [
            (
                e.primitive.name,
                e.primitive.implementations["cpu"],
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

    def run(self, buffers: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        slots = self.initial.copy()
        for slot, buffer in zip(self.inputs, buffers, strict=True):
            slots[slot] = buffer
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
        return [slots[i] for i in self.outputs]


def as_declared(name: str, x: Any, output: ArrayType) -> np.ndarray:
    """The result as the shape rule promised it; a disagreement is a bug in the primitive, not in its use."""
    x = np.asarray(x)
    if x.shape != output.shape or x.dtype != output.dtype:
        raise AssertionError(f"{name}: computed {x.dtype}{list(x.shape)}, the shape rule says {output}")
    # A broadcast is a view with stride 0 and stays one: whoever reads it reads the few elements it has.
    return x if x.flags.c_contiguous or 0 in x.strides else np.ascontiguousarray(x)
