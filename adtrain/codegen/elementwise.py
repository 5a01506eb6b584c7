"""Elementwise equations as C text: types, literals, elements, places of operands, and the axes of loops."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from adtrain.core.program import Equation, Program, Variable
from adtrain.core.types import Shape


@functools.cache  # the name of a NumPy type is slow to get
def c_type(dtype: np.dtype) -> str:
    """How C spells an element type: "float" for float32, "int64_t" for int64."""
    return {"float32": "float", "float64": "double", "bool": "bool"}.get(dtype.name, f"{dtype.name}_t")


def literal(x: float) -> str:
    """A Python number in C."""
    if isinstance(x, (bool, int, np.integer)):
        if x == -(2**63):
            return "(-9223372036854775807 - 1)"  # 2^63 without the sign is not an int64
        return str(int(x))
    if math.isnan(x):
        return "NAN"
    return repr(float(x)) if math.isfinite(x) else "INFINITY" if x > 0 else "-INFINITY"


def element(equation: Equation, arguments: Sequence[str], expressions: Mapping[str, str] | None = None) -> str:
    """One element of an elementwise equation's result, as a C expression of the elements of its arguments.

    Args:
        expressions: by primitive name, what replaces the primitive's own expression.
    """
    text = (expressions or {}).get(equation.primitive.name, equation.primitive.expression)
    if callable(text):
        text = text(**equation.params)
    assert text is not None
    t = equation.inputs[-1].type.dtype if equation.inputs else equation.outputs[0].type.dtype
    names = dict(zip("abc", arguments, strict=False))
    names |= {"T": c_type(t), "U": c_type(equation.outputs[0].type.dtype)}

    def replaced(match: re.Match[str]) -> str:
        if match[1]:
            return f"({literal(equation.params[match[1]])})"
        return names.get(match[0], match[0])

    return re.sub(r"\{(\w+)\}|\b\w+\b", replaced, text)


def pointer(v: Variable, const: bool = False) -> str:
    """The C type of a pointer to the elements of `v`."""
    return f"{'const ' if const else ''}{c_type(v.type.dtype)} *"


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


@dataclass(frozen=True)
class Axis:
    """A loop: its length, and the stride of each operand."""

    length: int
    strides: tuple[int, ...]


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


def offset(index: str, lengths: Sequence[int], steps: Sequence[int]) -> str:
    """C text: the offset of element ``index`` (row-major in ``lengths``) in an array with strides ``steps``."""
    terms, below = [], 1
    for k in range(len(lengths) - 1, -1, -1):
        if steps[k] and lengths[k] > 1:
            quotient = index if below == 1 else f"{index} / {below}"
            whole = below * lengths[k] == prod(lengths)
            place = quotient if whole else f"{quotient} % {lengths[k]}"
            terms.append(place if steps[k] == 1 else f"{place} * {steps[k]}")
        below *= lengths[k]
    return " + ".join(reversed(terms)) or "0"


def place(indices: Iterable[tuple[str, Sequence[Axis]]], operand: int = 0) -> str:
    """C text: the offset of an element of an operand. Each index is row-major in the axes beside it."""
    terms = (offset(index, [x.length for x in axes], [x.strides[operand] for x in axes]) for index, axes in indices)
    return " + ".join(term for term in terms if term != "0") or "0"


class Access(NamedTuple):
    """Where an operand is read for an element of a result.

    Attributes:
        place: C text of the offset; "0" if all elements of the result read the same one.
        step: the distance of the elements that are read for neighbours along the last axis.
        run: how many such neighbours have this distance.
    """

    place: str
    step: int
    run: int


def access(shape: Shape, within: Shape, *indices: tuple[str, int]) -> Access:
    """Where an operand of `shape` is read for elements of a result of the shape `within`, to which it broadcasts.

    Args:
        indices: for each index its C text, and the number of axes of the result over which it counts. The first index
            begins at axis 0, the next one at the axis after those of the first.
    """
    steps, axes, split = strides(shape, within), list[Axis](), list[tuple[str, Sequence[Axis]]]()
    begin = 0
    for index, count in indices:
        own = slice(begin, begin := begin + count)
        axes = merged(within[own], [steps[own]])
        split.append((index, axes))
    last = axes[-1] if axes else Axis(1, (0,))
    return Access(place(split), last.strides[0], last.length)


def read(v: Variable, name: str, pointer: str, place: str, wide: int | str = 1) -> tuple[str, str]:
    """C text of a definition of `name`, the element of `v` at a place or a vector of `wide` from there on; its value.

    The value of a vector is that of its lane k. Vectors are for CUDA.
    """
    return f"const {held(v, wide)} {name} = {loaded(v, pointer, place, wide)};", lane(name, wide)


def held(v: Variable, wide: int | str = 1) -> str:
    """The C type of an element, or of a vector of `wide` of them."""
    return c_type(v.type.dtype) if wide == 1 else f"Vector<{c_type(v.type.dtype)}, {wide}>"


def loaded(v: Variable, pointer: str, place: str, wide: int | str = 1) -> str:
    """C text of the element at a place, or of a vector of `wide` from there on."""
    return f"{pointer}[{place}]" if wide == 1 else f"load<{c_type(v.type.dtype)}, {wide}>({pointer} + {place})"


def lane(name: str, wide: int | str = 1) -> str:
    """The value of an element, or of lane k of a vector."""
    return name if wide == 1 else f"{name}.lane[k]"


def vector_results(
    program: Program, values: dict[Variable, str], wide: int | str, after: Sequence[str] = (), addends: int = 0
) -> list[str]:
    """CUDA statements that compute vectors ``r0``, ``r1``, ... of `wide` elements of the outputs.

    Args:
        values: C text of the inputs, for lane k.
        after: statements for lane k, after its results.
        addends: how many of the last outputs are elements of ``addends[0]``, ``addends[1]``, ... in place of a vector.
    """
    vectors = program.outputs[: len(program.outputs) - addends]
    results = [*(f"r{i}.lane[k]" for i in range(len(vectors))), *(f"addends[{i}][k]" for i in range(addends))]
    return [
        *(f"{held(v, wide)} r{i};" for i, v in enumerate(vectors)),
        "#pragma unroll",
        f"for (int k = 0; k < {wide}; k++) {{",
        *(f"    {line}" for line in (*statements(program, values, results), *after)),
        "}",
    ]
