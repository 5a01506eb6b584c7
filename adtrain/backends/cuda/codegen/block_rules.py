"""How one thread block computes an equation: for each primitive, statements over all threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from adtrain.backends.cuda.codegen.loops import flat
from adtrain.backends.cuda.codegen.part import Names, Step, StepRule, lanes_for, loop
from adtrain.codegen.elementwise import access, c_type, literal, offset, read, statements
from adtrain.core.kernel import WARP
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Variable, body_of
from adtrain.core.types import Shape
from adtrain.lowering.shapes import contiguous_strides, split_at
from adtrain.passes.fusion import by_element

REDUCTIONS = {"sum": "Sum", "max": "Max", "min": "Min"}
"""The operation of each reduction in `common/collectives.cuh`."""
MAX_SLICES = 4
"""Maximum partial sums of an element of a product."""
MAX_SERIAL_K = 32
"""Length K of a product up to which one thread computes an element alone."""

ColumnRule = Callable[[str, Variable, int, int, int, str, Names, int], Sequence[Step]]
"""How a block reduces columns: see `_in_slices`."""


def _elementwise(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    body = flat(body_of(equation))
    shape, lines, values = body.outputs[0].type.shape, [], {}
    for k, v in enumerate(body.inputs):
        place = access(v.type.shape, shape, ("i", len(shape))).place
        line, values[v] = read(v, f"b{k}", names[v], place)
        lines.append(line)
    lines += statements(body, values, [f"{names[v]}[i]" for v in body.outputs])
    return [loop(math.prod(shape), lines, threads)]


def _axes(shape: Shape, axes: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Lengths and strides of some axes of a contiguous array."""
    steps = contiguous_strides(shape)
    return [shape[i] for i in axes], [steps[i] for i in axes]


def reduction(equation: Equation, names: Names, threads: int, op: str, by_columns: ColumnRule) -> Sequence[Step]:
    """A reduction by a struct of `common/collectives.cuh`.

    Args:
        by_columns: computes it where neighbouring elements belong to different results, or there are few results.
    """
    (x,), (y,) = equation.inputs, equation.outputs
    shape, axes = x.type.shape, equation.params["axes"]
    output_axes = [i for i in range(len(shape)) if i not in axes]
    outputs, count = y.size, x.size // y.size
    a, e = c_type(y.type.dtype), c_type(x.type.dtype)
    start, place = offset("o", *_axes(shape, output_axes)), offset("r", *_axes(shape, axes))
    source, target = names[x], names[y]
    last = max((i for i, n in enumerate(shape) if n > 1), default=0)
    if (last in axes and outputs * WARP >= threads) or count == 1:
        lanes = lanes_for(count, outputs, threads)
        lines = [
            f"in_block::reduce_lanes<{op}, {a}, THREADS, {outputs}, {count}, {lanes}>(t,",
            f"    [&](int o, int r) {{ return ({a}){source}[{start} + {place}]; }},",
            f"    [&](int o, {a} value) {{ {target}[o] = value; }});",
        ]
        return [Step(lines, min(outputs * lanes, threads))]
    wide = math.gcd(16 // x.type.dtype.itemsize, shape[last]) if last not in axes else 1
    read = f"return load<{e}, {wide}>({source} + {start} + {place});"
    return by_columns(op, y, count, min(threads * wide // outputs, count), wide, read, names, threads)


def _in_slices(
    op: str, y: Variable, count: int, slices: int, wide: int, read: str, names: Names, threads: int
) -> Sequence[Step]:
    """A reduction of `count` elements to each of y, in `slices` if that is more than one, which are then reduced.

    `read` returns element r of `wide` neighbouring results from o on.
    """
    target, a, columns, slices = names[y], c_type(y.type.dtype), y.size // wide, max(slices, 1)
    into = f"({a} *)partial" if slices > 1 else target
    reduced = [
        f"in_block::reduce_slices<{op}, {a}, THREADS, {y.size}, {count}, {slices}, {wide}>(t, {into},",
        f"    [&](int o, int r) {{ {read} }});",
    ]
    if slices == 1:
        return [Step(reduced, min(columns, threads))]
    lanes = lanes_for(slices, y.size, threads)
    added = [
        f"in_block::reduce_lanes<{op}, {a}, THREADS, {y.size}, {slices}, {lanes}>(t,",
        f"    [&](int o, int r) {{ return (({a} *)partial)[r * {y.size} + o]; }},",
        f"    [&](int o, {a} value) {{ {target}[o] = value; }});",
    ]
    size = slices * y.size * y.type.dtype.itemsize
    return [Step(reduced, min(columns * slices, threads), size), Step(added, min(y.size * lanes, threads))]


def _along_axis(equation: Equation, names: Names, threads: int, function: str) -> Sequence[Step]:
    """A function of `common/block_ops.cuh` with its first template arguments, for slices along an axis."""
    (x,), (y,) = equation.inputs, equation.outputs
    outer, length, inner = split_at(x.type.shape, equation.params["axis"])
    lanes = lanes_for(length, outer * inner, threads)
    numbers = f"{outer * inner}, {length}, {inner}, {lanes}"
    line = f"in_block::{function}, {numbers}>(t, {names[x]}, {names[y]});"
    return [Step([line], min(outer * inner * lanes, threads))]


def _standardize(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    (x,), (y, mean, variance) = equation.inputs, equation.outputs
    shape, axes = x.type.shape, equation.params["axes"]
    kept, count = [i for i in range(len(shape)) if i not in axes], x.size // mean.size
    lanes = lanes_for(count, mean.size, threads)
    place = f"{offset('o', *_axes(shape, kept))} + {offset('r', *_axes(shape, axes))}"
    t, eps = c_type(x.type.dtype), literal(equation.params["eps"])
    pointers = ", ".join(names[v] for v in (x, y, mean, variance))
    lines = [
        f"in_block::standardize<{t}, THREADS, {mean.size}, {count}, {lanes}>(t, {pointers}, ({t}){eps},",
        f"    [](int o, int r) {{ return {place}; }});",
    ]
    return [Step(lines, min(mean.size * lanes, threads))]


def _concatenate(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    (y,) = equation.outputs
    _, _, row = split_at(y.type.shape, equation.params["axis"])
    whole, start, most = row * y.type.shape[equation.params["axis"]], 0, 0
    lines: list[str] = []
    for x in equation.inputs:
        own = row * x.type.shape[equation.params["axis"]]
        if own:
            place = f"i / {own} * {whole} + {start} + i % {own}"
            lines += loop(x.size, [f"{names[y]}[{place}] = {names[x]}[i];"], threads).lines
        start, most = start + own, max(most, x.size)
    return [Step(lines, most)]


def _transpose(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    (x,), (y,) = equation.inputs, equation.outputs
    steps = contiguous_strides(x.type.shape)
    place = offset("i", y.type.shape, [steps[axis] for axis in equation.params["axes"]])
    return [loop(y.size, [f"{names[y]}[i] = {names[x]}[{place}];"], threads)]


def _slice(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    (x,), (y,) = equation.inputs, equation.outputs
    steps = contiguous_strides(x.type.shape)
    start = sum(a * s for a, s in zip(equation.params["starts"], steps, strict=True))
    place = offset("i", y.type.shape, [a * s for a, s in zip(equation.params["steps"], steps, strict=True)])
    return [loop(y.size, [f"{names[y]}[i] = {names[x]}[{start} + {place}];"], threads)]


def matmul(equation: Equation, names: Names, threads: int, by_columns: ColumnRule) -> Sequence[Step]:
    """A few rows by a small matrix: one thread for a short sum, several lanes for a long one.

    Args:
        by_columns: computes a product whose left operand is transposed.
    """
    (a, b), (y,) = equation.inputs, equation.outputs
    transposed = equation.params["transpose_b"]
    (m, n), k = y.type.shape, a.size // y.type.shape[0]
    t, pointers = c_type(y.type.dtype), ", ".join(names[v] for v in (a, b, y))
    if equation.params["transpose_a"]:
        wide = math.gcd(16 // y.type.dtype.itemsize, n)
        read = (
            f"const {t} left = {names[a]}[r * {m} + o / {n}]; "
            f"auto products = load<{t}, {wide}>({names[b]} + r * {n} + o % {n}); "
            f"for (int i = 0; i < {wide}; i++) products.lane[i] *= left; "
            "return products;"
        )
        slices = min(threads * wide // y.size, k, MAX_SLICES)
        return by_columns("Sum", y, k, slices, wide, read, names, threads)
    if k <= MAX_SERIAL_K:
        steps = f"1, {k}" if transposed else f"{n}, 1"
        line = f"in_block::short_products<{t}, THREADS, {m}, {n}, {k}, {steps}>(t, {pointers});"
        return [Step([line], min(y.size, threads))]
    lanes = lanes_for(k, y.size, threads)
    if transposed:
        wide = math.gcd(16 // y.type.dtype.itemsize, k)
        line = f"in_block::long_products<{t}, THREADS, {m}, {n}, {k}, {lanes}, {wide}>(t, {pointers});"
        return [Step([line], min(y.size * lanes, threads))]
    lines = [
        f"in_block::reduce_lanes<Sum, {t}, THREADS, {y.size}, {k}, {lanes}>(t,",
        f"    [&](int o, int r) {{ return {names[a]}[o / {n} * {k} + r] * {names[b]}[r * {n} + o % {n}]; }},",
        f"    [&](int o, {t} value) {{ {names[y]}[o] = value; }});",
    ]
    return [Step(lines, min(y.size * lanes, threads))]


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


RULES: Mapping[str, StepRule] = {
    **{name: partial(reduction, op=op, by_columns=_in_slices) for name, op in REDUCTIONS.items()},
    "softmax": partial(_along_axis, function="softmax<false, THREADS"),
    "log_softmax": partial(_along_axis, function="softmax<true, THREADS"),
    "argmax": partial(_along_axis, function="argmax<THREADS"),
    **BY_INDEX,
    "concatenate": _concatenate,
    "transpose": _transpose,
    "slice": _slice,
    "standardize": _standardize,
}
"""By primitive name. Elementwise equations and products have rules of their own; a reshape needs none."""


def rule_of(equation: Equation) -> StepRule:
    """How one thread block computes an equation."""
    if by_element(equation):
        return _elementwise
    return partial(matmul, by_columns=_in_slices) if equation.has(Trait.MATMUL) else RULES[equation.primitive.name]
