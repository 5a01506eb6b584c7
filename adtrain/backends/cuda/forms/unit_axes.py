"""Which values of a step have an axis of the units of its first layer, and how equations treat it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from adtrain.backends.cuda.forms.resident_layer import ResidentLayer, carried
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.fuse_elementwise import elementwise

Axis = tuple[Variable, int]


def axes_of_units(body: Program, layer: ResidentLayer) -> Mapping[Variable, int] | None:
    """The axis of units of each value that has one. None if a value has two."""
    same: dict[Axis, set[Axis]] = {}
    pairs = [axes for e in body.equations if e is not layer.gather for axes in _same_axes(e)]
    for before, after in carried(body).items():
        pairs += [((before, i), (after, i)) for i in range(len(before.type.shape))]
    for a, b in pairs:
        same.setdefault(a, set()).add(b)
        same.setdefault(b, set()).add(a)
    first = (layer.states[0][0], 0)
    found, waiting = {first}, [first]
    while waiting:
        more = same.get(waiting.pop(), set()) - found
        found |= more
        waiting += more
    axes = dict(found)
    return axes if len(axes) == len(found) else None


def _same_axes(equation: Equation) -> Iterator[tuple[Axis, Axis]]:
    """Pairs of axes of an equation's values along which element i of one belongs to element i of the other."""
    e = equation
    if e.form:
        for member in e.params["body"].equations:
            yield from _same_axes(member)
        return
    y, shape = e.outputs[0], e.outputs[0].type.shape
    if e.has(Trait.MATMUL) and len(shape) == 2:
        (a, b), (row, column, k_of_a, k_of_b) = e.inputs, _matmul_axes(e)
        yield from (((a, row), (y, 0)), ((b, column), (y, 1)), ((a, k_of_a), (b, k_of_b)))
    elif elementwise(e):
        for v in (*e.inputs, *e.outputs[1:]):
            first = len(shape) - len(v.type.shape)
            yield from (((v, i), (y, first + i)) for i, n in enumerate(v.type.shape) if n == shape[first + i])
    elif e.has(Trait.RESHAPE):
        yield from _same_strides(e.inputs[0], y)
    elif e.has(Trait.REDUCTION):
        x = e.inputs[0]
        kept = [i for i in range(len(x.type.shape)) if i not in e.params["axes"]]
        yield from (((x, i), (y, k)) for k, i in enumerate(kept))


def _matmul_axes(equation: Equation) -> tuple[int, int, int, int]:
    """The axis of rows in the first operand, that of columns in the second one, and that of K in both."""
    a, b = bool(equation.params["transpose_a"]), bool(equation.params["transpose_b"])
    return int(a), int(not b), int(not a), int(b)


def _same_strides(x: Variable, y: Variable) -> Iterator[tuple[Axis, Axis]]:
    """The pairs of axes of a value and its reshape with the same length and stride."""
    found: list[dict[tuple[int, int], Axis]] = []
    for v in (x, y):
        below, axes = 1, {}
        for i in range(len(v.type.shape) - 1, -1, -1):
            axes[v.type.shape[i], below] = (v, i)
            below *= v.type.shape[i]
        found.append(axes)
    yield from ((axis, found[1][key]) for key, axis in found[0].items() if key[0] > 1 and key in found[1])


def is_local(equation: Equation, axes: Mapping[Variable, int]) -> bool:
    """Whether a block that has its part of the inputs can compute its part of the outputs."""
    e = equation
    if axes.keys().isdisjoint((*e.inputs, *e.outputs)) or elementwise(e):
        return True
    if e.has(Trait.MATMUL):
        return axes.get(e.inputs[0]) != _matmul_axes(e)[2]
    if e.has(Trait.REDUCTION):
        return axes[e.inputs[0]] not in e.params["axes"]
    return e.has(Trait.RESHAPE) and {*e.inputs, *e.outputs} <= axes.keys()


def adds_units(equation: Equation, axes: Mapping[Variable, int]) -> bool:
    """Whether the sum of what all blocks compute is the result."""
    e = equation
    sums = e.has(Trait.MATMUL) or e.primitive.name == "sum"
    return sums and not is_local(e, axes) and axes.keys().isdisjoint(e.outputs)
