"""One kernel for a group of elementwise equations: each argument is read once, each result written once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from adtrain.backends.cuda.compiler import Source
from adtrain.codegen.elementwise import Axis, axes_of, statements
from adtrain.codegen.expressions import c_type, pointer
from adtrain.core.fused import body_of
from adtrain.core.program import Equation, Program, Variable

WIDEST = 16
"""Bytes that one thread can read or write at once."""

# So that an equation gives the same bits alone as fused with others.
OPTIONS = ("--fmad=false",)


class Loops(NamedTuple):
    """A generated kernel ``loops(inputs..., outputs..., int64_t n)``.

    Attributes:
        elements: how many elements the results have.
        width: how many of them a thread computes at a time.
    """

    source: Source
    elements: int
    width: int


def loops(equation: Equation) -> Loops:
    """The kernel of a `loops` equation, or of a single elementwise one."""
    body = body_of(equation)
    shape = body.outputs[0].type.shape
    axes = axes_of(body, shape)
    width = WIDEST // max(v.type.dtype.itemsize for v in (*body.inputs, *body.outputs))
    if len(axes) > 1 and axes[-1].length % width:
        width = 1  # a vector must not reach into the next row
    return Loops(Source("loops.cu", _text(body, axes, width), OPTIONS), math.prod(shape), width)


def _text(body: Program, axes: Sequence[Axis], width: int) -> str:
    """The source. Elements are numbered as they lie in the results; n is their count.

    An operand that moves as the results do is read at that number, a single number once for all, and a broadcast at an
    index taken apart into the axes.
    """
    inputs = [f"{pointer(v, const=True)}x{i}" for i, v in enumerate(body.inputs)]
    outputs = [f"{pointer(v)}y{i}" for i, v in enumerate(body.outputs)]
    lines = [
        '#include "common.cuh"',
        "",
        f"KERNEL loops({', '.join([*inputs, *outputs, 'int64_t n'])})",
        "{",
        "    wait_for_inputs();",
        *(f"    {line}" for line in _statements(body, axes, width)),
        "}",
        "",
    ]
    return "\n".join(lines)


def _statements(body: Program, axes: Sequence[Axis], width: int) -> list[str]:
    before: list[str] = []
    values: dict[Variable, str] = {}
    moving: dict[int, str] = {}  # inputs read for each element: their index, as C
    for i, v in enumerate(body.inputs):
        steps = [axis.strides[i] for axis in axes]
        if not any(steps):
            before.append(f"const {c_type(v.type.dtype)} a{i} = x{i}[0];")
            values[v] = f"a{i}"
        elif steps == [axis.strides[-1] for axis in axes]:
            moving[i] = "i"
        else:
            moving[i] = " + ".join(f"i{k} * {step}" for k, step in enumerate(steps) if step)
    need_indices = any(index != "i" for index in moving.values())
    indices = _indices(axes) if need_indices else []

    one = list(indices)
    single = dict(values)
    for i, index in moving.items():
        v = body.inputs[i]
        one.append(f"const {c_type(v.type.dtype)} b{i} = x{i}[{index}];")
        single[v] = f"b{i}"
    one += statements(body, single, [f"y{i}[i]" for i in range(len(body.outputs))])
    if width == 1:
        return [*before, "for (int64_t i = grid_index(); i < n; i += grid_size()) {", *_indented(one), "}"]

    vector = ["const int64_t i = g * WIDTH;", *indices]
    by_lane = dict(values)
    for i, index in moving.items():
        v, c = body.inputs[i], c_type(body.inputs[i].type.dtype)
        if index == "i" or axes[-1].strides[i] == 1:
            vector.append(f"const Vector<{c}, WIDTH> v{i} = load<{c}, WIDTH>(x{i} + {index});")
            by_lane[v] = f"v{i}.lane[k]"
        else:  # the same for the whole vector, which lies in one row
            vector.append(f"const {c} b{i} = x{i}[{index}];")
            by_lane[v] = f"b{i}"
    results = []
    for i, v in enumerate(body.outputs):
        vector.append(f"Vector<{c_type(v.type.dtype)}, WIDTH> r{i};")
        results.append(f"r{i}.lane[k]")
    vector += [
        "#pragma unroll",
        "for (int k = 0; k < WIDTH; k++) {",
        *_indented(statements(body, by_lane, results)),
        "}",
    ]
    vector += [f"store(y{i}, i, r{i});" for i in range(len(body.outputs))]

    pointers = [f"x{i}" for i in moving] + [f"y{i}" for i in range(len(body.outputs))]
    aligned = " | ".join(f"(uintptr_t){p}" for p in pointers)
    return [
        f"constexpr int WIDTH = {width};",
        *before,
        f"const int64_t vectors = ({aligned}) % {WIDEST} == 0 ? n / WIDTH : 0;",
        "for (int64_t g = grid_index(); g < vectors; g += grid_size()) {",
        *_indented(vector),
        "}",
        "for (int64_t i = vectors * WIDTH + grid_index(); i < n; i += grid_size()) {",
        *_indented(one),
        "}",
    ]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _indices(axes: Sequence[Axis]) -> list[str]:
    """Element i's index along each axis; 32 bits divide several times faster than 64."""
    count = math.prod(axis.length for axis in axes)
    kind = "uint32_t" if count < 2**31 else "int64_t"
    lines, below = [f"const {kind} at = ({kind})i;"], 1
    for k in range(len(axes) - 1, -1, -1):
        quotient = "at" if below == 1 else f"at / {below}"
        lines.append(f"const int64_t i{k} = {quotient}{'' if k == 0 else f' % {axes[k].length}'};")
        below *= axes[k].length
    return lines
