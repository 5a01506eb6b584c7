"""How one thread block computes equations that read or write elements by index. Indices are checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from adtrain.backends.cuda.codegen.part import Names, Step, StepRule, loop
from adtrain.codegen.elementwise import c_type
from adtrain.core.program import Equation, Variable
from adtrain.lowering.shapes import split_at


def take(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    (y,) = equation.outputs
    return [loop(y.size, _taken(equation, names, f"{names[y]}[i]"), threads)]


def overlapped_take(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    """A gather, whose loads are in flight while the block computes other equations."""
    (y,) = equation.outputs
    if y.size > threads:
        return take(equation, names, threads)
    value = f"taken_{names[y]}"
    loads = loop(y.size, _taken(equation, names, value), threads).lines
    declared = [f"{c_type(y.type.dtype)} {value};"]
    return [Step([f"if (t < {y.size}) {names[y]}[t] = {value};"], y.size, declared=declared, loads=loads)]


def _taken(equation: Equation, names: Names, target: str) -> Sequence[str]:
    """Statements that gather element i of the result to `target`."""
    (x, indices), (y,) = equation.inputs, equation.outputs
    _, length, inner = split_at(x.type.shape, equation.params["axis"])
    at = f"i / {inner} % {indices.size}" if y.size != indices.size else "i"
    row = f"(i / {inner * indices.size} * {length}LL + index) * {inner} + i % {inner}"
    return _read_by_index(x, names, f"{names[indices]}[{at}]", length, row, target)


def take_along_axis(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    (x, indices), (y,) = equation.inputs, equation.outputs
    axis = equation.params["axis"]
    _, length, inner = split_at(x.type.shape, axis)
    row = f"(i / {inner * indices.type.shape[axis]} * {length}LL + index) * {inner} + i % {inner}"
    lines = _read_by_index(x, names, f"{names[indices]}[i]", length, row, f"{names[y]}[i]")
    return [loop(y.size, lines, threads)]


def _read_by_index(x: Variable, names: Names, index: str, length: int, row: str, target: str) -> Sequence[str]:
    read = f"in_block::valid(index, {length}, bad) ? {names[x]}[{row}] : ({c_type(x.type.dtype)})0"
    return [f"const int64_t index = {index};", f"{target} = {read};"]


def scatter_along_axis(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    (ct, indices), (y,) = equation.inputs, equation.outputs
    axis, length = equation.params["axis"], equation.params["length"]
    _, count, inner = split_at(ct.type.shape, axis)
    lines = [
        f"const int l = i / {inner} % {length}, start = i / {length * inner} * {count * inner} + i % {inner};",
        f"{c_type(y.type.dtype)} sum = 0;",
        f"for (int j = start; j < start + {count * inner}; j += {inner}) {{",
        f"    const int64_t index = {names[indices]}[j];",
        f"    if (in_block::valid(index, {length}, bad) && index == l)",
        f"        sum += {names[ct]}[j];",
        "}",
        f"{names[y]}[i] = sum;",
    ]
    return [loop(y.size, lines, threads)]


def one_hot(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    (indices,), (y,) = equation.inputs, equation.outputs
    classes = equation.params["num_classes"]
    value = f"in_block::valid(index, {classes}, bad) && index == i % {classes}"
    lines = [f"const int64_t index = {names[indices]}[i / {classes}];", f"{names[y]}[i] = {value};"]
    return [loop(y.size, lines, threads)]


BY_INDEX: Mapping[str, StepRule] = {
    "take": take,
    "take_along_axis": take_along_axis,
    "scatter_along_axis": scatter_along_axis,
    "one_hot": one_hot,
}
"""By primitive name."""


def is_checked(equation: Equation) -> bool:
    """Whether it reads indices, which may be out of range."""
    return equation.primitive.name in BY_INDEX
