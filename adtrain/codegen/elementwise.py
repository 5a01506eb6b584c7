"""Elementwise equations as C statements, and the axes of the loops around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adtrain.codegen.expressions import c_type, element, literal
from adtrain.core.program import Program, Variable
from adtrain.core.types import Shape


@dataclass(frozen=True)
class Axis:
    """A loop: its length, and the stride of each operand."""

    length: int
    strides: tuple[int, ...]


def statements(
    body: Program, values: dict[Variable, str], results: Sequence[str], expressions: Mapping[str, str] | None = None
) -> list[str]:
    """One element of each equation, `values` being those of the arguments, stored in `results`.

    Args:
        expressions: as in `element`.
    """
    lines = []
    names = dict(values)
    for i, e in enumerate(body.equations):
        (out,) = e.outputs
        if e.primitive.name == "broadcast_to":
            names[out] = names[e.inputs[0]]
            continue
        c = c_type(out.type.dtype)
        own = [names[v] for v in e.inputs]
        value = literal(e.params["value"]) if e.primitive.name == "full" else element(e, own, expressions)
        lines.append(f"const {c} t{i} = {value};")
        names[out] = f"t{i}"
    return lines + [f"{place} = {names[v]};" for place, v in zip(results, body.outputs, strict=True)]


def strides(shape: Shape, within: Shape) -> tuple[int, ...]:
    """The stride of an array of `shape` along each axis of `within`, to which it broadcasts."""
    found, step = [0] * len(within), 1
    for i, length in zip(range(len(within) - 1, -1, -1), reversed(shape), strict=False):
        found[i] = step if length == within[i] and length != 1 else 0
        step *= length
    return tuple(found)


def axes_of(body: Program, items: int | None = None) -> list[Axis]:
    """The fewest loops over the elements of a body's outputs: axes are merged where all operands have one stride.

    Args:
        items: length of axis 0 in place of the outputs' own, for a loop over some of its indices.
    """
    full = body.outputs[0].type.shape

    def taken(shape: Shape) -> Shape:
        if items is None or len(shape) < len(full) or shape[0] != full[0]:
            return shape
        return items, *shape[1:]

    shape = taken(full)
    shapes = [taken(v.type.shape) for v in body.inputs]
    return merged(shape, [strides(s, shape) for s in [*shapes, *(shape for _ in body.outputs)]])


def merged(lengths: Shape, operands: Sequence[Sequence[int]]) -> list[Axis]:
    """The fewest loops over axes of these lengths, for operands with these strides."""
    axes: list[Axis] = []
    for i, length in enumerate(lengths):
        axis = Axis(length, tuple(steps[i] for steps in operands))
        if length == 1:
            continue
        if axes and all(a == b * length for a, b in zip(axes[-1].strides, axis.strides, strict=True)):
            axis = Axis(axes.pop().length * length, axis.strides)
        axes.append(axis)
    return axes
