"""Compute examples of `vmap` without the axis of their one item, so that other passes find the equations of a batch.

A loss of one example is that of a batch of one. Under `vmap` its values have the shape (N, 1, ...), and those of
convolutions (N, ...), with reshapes between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from adtrain.core.primitive import PRIMITIVES, Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.core.types import ArrayType, Shape
from adtrain.passes.dead_code import remove_dead_code
from adtrain.passes.fuse_elementwise import elementwise
from adtrain.passes.simplify_reshapes import simplify_reshapes


@keeps(Results.ROUNDING)
def drop_unit_axes(program: Program) -> Program:
    """``program`` with elementwise equations and reductions on (N, ...) in place of (N, 1, ...), and one broadcast in
    place of a broadcast of a broadcast: to the item, then to the examples."""
    repeated = {e.outputs[0]: e.inputs for e in program.equations if e.has(Trait.BROADCAST) and e.inputs}
    merged = [
        replace(e, inputs=repeated.get(e.inputs[0], e.inputs)) if e.has(Trait.BROADCAST) and e.inputs else e
        for e in program.equations
    ]
    equations = [x for e in merged for x in _without_axis(e)]
    return remove_dead_code(simplify_reshapes(replace(program, equations=tuple(equations))))


def _without_axis(e: Equation) -> list[Equation]:
    """`e` between reshapes, if it is an equation on (N, 1, ...)."""
    if e.has(Trait.REDUCTION) and "axes" in e.params:
        (x,), axes = e.inputs, e.params["axes"]
        if not _has_axis(x.type.shape):
            return [e]
        if axes == (1,):
            return [_reshape(e, x, e.outputs[0])]
        others = tuple(a - (a > 1) for a in axes if a != 1)
        return _around(e, (_dropped(x),), {**e.params, "axes": others})
    if not _has_axis(e.outputs[0].type.shape):
        return [e]
    if e.has(Trait.BROADCAST) and e.inputs:
        (x,), shape = e.inputs, e.outputs[0].type.shape
        axis = 1 - len(shape) + len(x.type.shape)
        return _around(e, (_dropped(x, axis) if axis >= 0 else x,), {**e.params, "shape": _shape(shape)})
    if elementwise(e):
        return _around(e, tuple(_dropped(v) if v.type.shape else v for v in e.inputs), e.params)
    return [e]


def _has_axis(shape: Shape) -> bool:
    return len(shape) > 1 and shape[1] == 1


def _shape(shape: Shape, axis: int = 1) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


def _dropped(v: Variable, axis: int = 1) -> Variable:
    return v.like(ArrayType(_shape(v.type.shape, axis), v.type.dtype))


def _around(e: Equation, inputs: tuple[Variable, ...], params: Mapping[str, Any]) -> list[Equation]:
    """`e` with other inputs and parameters, and reshapes before and after it."""
    types = e.primitive.output_types([v.type for v in inputs], params)
    outputs = tuple(v.like(t) for v, t in zip(e.outputs, types, strict=True))
    before = [_reshape(e, v, new) for v, new in zip(e.inputs, inputs, strict=True) if new is not v]
    after = [_reshape(e, new, v) for v, new in zip(e.outputs, outputs, strict=True)]
    return [*before, replace(e, inputs=inputs, params=params, outputs=outputs), *after]


def _reshape(like: Equation, x: Variable, out: Variable) -> Equation:
    return Equation(PRIMITIVES["reshape"], (x,), {"shape": out.type.shape}, (out,), like.scope, like.phase)
