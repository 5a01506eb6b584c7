"""Loop nests: C for a group of elementwise equations, which reads each argument once and writes each result once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from adtrain.backends.cpu.codegen.text import Writer, element, literal, pointer
from adtrain.backends.cpu.compiler import c_type
from adtrain.core.array import Shape
from adtrain.core.program import Program, Variable

FEW_ROWS = 32
"""With fewer, a row is divided among the threads instead of the rows."""
FEW_ELEMENTS = 1024
"""So many or fewer are left to one thread: the others would be done no sooner than they have been told."""


def by_one_thread(body: Program) -> bool:
    """Whether a body's elements are too few to be divided among threads."""
    return body.outputs[0].size <= FEW_ELEMENTS


@dataclass(frozen=True)
class Axis:
    """A loop: its length, and how far each operand moves with it."""

    length: int
    strides: tuple[int, ...]


def team_loops(writer: Writer, body: Program) -> str:
    """A function ``(team, inputs..., outputs...)`` in which the threads divide the elements among themselves."""
    axes = axes_of(body, body.outputs[0].type.shape)
    nest = _Nest(body, axes)
    parameters = f"const Team *team, {_parameters(body)}"
    inner, rows = (axes[-1].length if axes else 1), math.prod(axis.length for axis in axes[:-1])
    if by_one_thread(body):
        lines = ["if (team->thread > 0)", "    return;", *nest.lines("0", str(rows), "0", str(inner))]
        return writer.function("loops", parameters, lines)
    share = "int64_t begin, end;"
    if rows >= FEW_ROWS:
        divided = [share, f"my_share(team, {rows}, &begin, &end);", *nest.lines("begin", "end", "0", str(inner))]
    else:
        divided = [share, f"my_lines(team, {inner}, &begin, &end);", *nest.lines("0", str(rows), "begin", "end")]
    return writer.function("loops", parameters, divided)


def item_loops(writer: Writer, body: Program) -> str:
    """A function ``(inputs..., outputs...)`` that computes one item, with pointers to its elements."""
    axes = axes_of(body, body.outputs[0].type.shape[1:], item=True)
    nest = _Nest(body, axes)
    inner, rows = (axes[-1].length if axes else 1), math.prod(axis.length for axis in axes[:-1])
    return writer.function("item_loops", _parameters(body), nest.lines("0", str(rows), "0", str(inner)))


def statements(body: Program, values: dict[Variable, str], results: Sequence[str]) -> list[str]:
    """One element of each equation, `values` being those of the arguments, stored in `results`."""
    lines = []
    names = dict(values)
    for i, e in enumerate(body.equations):
        (out,) = e.outputs
        if e.primitive.name == "broadcast_to":
            names[out] = names[e.inputs[0]]
            continue
        c = c_type(out.type.dtype)
        value = literal(e.params["value"]) if e.primitive.name == "full" else element(e, [names[v] for v in e.inputs])
        lines.append(f"const {c} t{i} = {value};")
        names[out] = f"t{i}"
    return lines + [f"{place} = {names[v]};" for place, v in zip(results, body.outputs, strict=True)]


def strides(shape: Shape, within: Shape) -> tuple[int, ...]:
    """How far an array of `shape` moves along each axis of `within`, which it broadcasts to."""
    found, step = [0] * len(within), 1
    for i, length in zip(range(len(within) - 1, -1, -1), reversed(shape), strict=False):
        found[i] = step if length == within[i] and length != 1 else 0
        step *= length
    return tuple(found)


def _parameters(body: Program) -> str:
    inputs = [f"{pointer(v, const=True)}x{i}" for i, v in enumerate(body.inputs)]
    return ", ".join(inputs + [f"{pointer(v)}y{i}" for i, v in enumerate(body.outputs)])


def axes_of(body: Program, shape: Shape, item: bool = False) -> list[Axis]:
    """The fewest loops over `shape`: axes that all operands pass through in one stride are one."""
    full = len(shape) + item
    shapes = [v.type.shape[1:] if item and len(v.type.shape) == full else v.type.shape for v in body.inputs]
    columns = [strides(s, shape) for s in [*shapes, *(shape for _ in body.outputs)]]
    axes: list[Axis] = []
    for i, length in enumerate(shape):
        axis = Axis(length, tuple(column[i] for column in columns))
        if length == 1:
            continue
        if axes and all(a == b * length for a, b in zip(axes[-1].strides, axis.strides, strict=True)):
            axis = Axis(axes.pop().length * length, axis.strides)
        axes.append(axis)
    return axes


@dataclass(frozen=True)
class _Nest:
    """The loops over a body's elements; all axes but the last are rows."""

    body: Program
    axes: Sequence[Axis]

    def lines(self, row: str, rows: str, column: str, columns: str) -> list[str]:
        """C for the rows and columns between these bounds."""
        values: dict[Variable, str] = {}
        before: list[str] = []
        at_row: list[str] = []
        for i, v in enumerate(self.body.inputs):
            outer = [f"i{k} * {axis.strides[i]}" for k, axis in enumerate(self.axes[:-1]) if axis.strides[i]]
            inner = self.axes[-1].strides[i] if self.axes else 0
            base = " + ".join([f"x{i}", *outer])
            if inner:
                values[v] = f"p{i}[j]" if inner == 1 else f"p{i}[j * {inner}]"
                at_row.append(f"{pointer(v, const=True)}p{i} = {base};")
            else:
                values[v] = f"a{i}"
                (at_row if outer else before).append(f"const {c_type(v.type.dtype)} a{i} = *({base});")
        results = []
        for i, v in enumerate(self.body.outputs, len(self.body.inputs)):
            outer = [f"i{k} * {axis.strides[i]}" for k, axis in enumerate(self.axes[:-1])]
            at_row.append(f"{pointer(v)}q{i} = {' + '.join([f'y{i - len(self.body.inputs)}', *outer])};")
            results.append(f"q{i}[j]")
        loop = ["#pragma omp simd", f"for (int64_t j = {column}; j < {columns}; j++) {{"]
        loop += [f"    {line}" for line in statements(self.body, values, results)] + ["}"]
        if len(self.axes) < 2:
            return [*before, *at_row, *loop]
        inside = [*self._indices(), *at_row, *loop]
        return [
            *before,
            f"for (int64_t row = {row}; row < {rows}; row++) {{",
            *(f"    {line}" for line in inside),
            "}",
        ]

    def _indices(self) -> list[str]:
        """The row's number taken apart into the outer loops' indices."""
        lines, below = [], 1
        outer = self.axes[:-1]
        for k in range(len(outer) - 1, -1, -1):
            quotient = "row" if below == 1 else f"row / {below}"
            lines.append(f"const int64_t i{k} = {quotient}{'' if k == 0 else f' % {outer[k].length}'};")
            below *= outer[k].length
        return lines
