"""Slices of items: equations on one slice of an item, so that the values of a step stay in the nearest cache.

An item of a batch of images is an image, and its slices are some of its channels. The equations compute a slice from
the same slice of their arguments. Sums over items, or over slices, are added slice by slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from adtrain.backends.cpu.forms.batchwise import item_count, item_kernel, item_rule, sums_items
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable, joined, related_axes, renamed
from adtrain.core.types import ArrayType
from adtrain.passes.fuse_elementwise import by_element

SLICE_BYTES = 1 << 13
"""Maximum bytes of each value in a slice."""
MIN_SLICE_BYTES = 1 << 10
"""Minimum bytes of the largest value in a slice. In shorter slices the calls of functions take too much of the time."""


@dataclass(frozen=True)
class Slices:
    """How the items of a body are divided.

    Attributes:
        body: the same equations on the values of one slice.
        count: the number of slices of an item.
        whole: for each value of a slice the value of the items.
        steps: for each value of a slice that is read or written whole, the elements from a slice to the next one.
        adds: whether a sum is over the slices, too.
    """

    body: Program
    count: int
    whole: Mapping[Variable, Variable]
    steps: Mapping[Variable, int]
    adds: bool


def slices_of(body: Program) -> Slices:
    """The fewest slices of an item that are small enough; one slice if the items cannot be divided."""
    for axes in joined(related_axes(body.equations)) if _is_worth_it(body) else ():
        if (found := _sliced(body, dict(axes), len(axes))) is not None:
            return found
    return undivided(body)


def undivided(body: Program) -> Slices:
    """One slice, which is the item."""
    values = (*body.inputs, *(v for e in body.equations for v in e.outputs))
    return Slices(body, 1, {v: v for v in values}, {}, False)


def _item_bytes(v: Variable) -> int:
    return v.nbytes // max(v.type.shape[0], 1) if v.type.shape else 0


def _is_worth_it(body: Program) -> bool:
    """Whether several equations work on long items, and can work on a slice."""
    computed = [e for e in body.equations if not e.has(Trait.RESHAPE)]
    largest = max((_item_bytes(v) for e in computed for v in (*e.inputs, *e.outputs)), default=0)
    return len(computed) > 1 and largest > SLICE_BYTES and all(map(_by_slice, body.equations))


def _by_slice(equation: Equation) -> bool:
    """Whether its function computes arrays of any lengths along the axes that move together."""
    if by_element(equation) or equation.has(Trait.RESHAPE):
        return True
    kernel = item_kernel(equation)
    return kernel is not None and equation.axes.leading and not (kernel.prepared or kernel.collected or kernel.checked)


def _sliced(body: Program, at: Mapping[Variable, int], axes: int) -> Slices | None:
    """The slices along axes that move together, `at` one of each value.

    None if an axis is not the first one of the items, or no slice has a useful size.
    """
    if len(at) < axes:  # two axes of one value
        return None
    length, count = max(v.type.shape[axis] for v, axis in at.items()), item_count(body.equations)
    by_item = {v for e in body.equations for v in _items_of(e)}
    rows = [v.nbytes // (count * length) for v in at if v in by_item]
    lengths = [n for n in range(1, length + 1) if length % n == 0 and n * max(rows, default=0) <= SLICE_BYTES]
    next_axes = all(_is_next(v, axis, v in by_item, count) for v, axis in at.items())
    if not next_axes or not lengths or lengths[-1] == length:
        return None
    if lengths[-1] * max(rows, default=0) < MIN_SLICE_BYTES:
        return None
    if not all(_follows(e, at) for e in body.equations):
        return None
    part = lengths[-1]
    names = {
        v: v.like(ArrayType((*v.type.shape[:axis], part, *v.type.shape[axis + 1 :]), v.type.dtype))
        for v, axis in at.items()
    }
    values = (*body.inputs, *(v for e in body.equations for v in e.outputs))
    inputs, outputs = (tuple(names.get(v, v) for v in group) for group in (body.inputs, body.outputs))
    sliced = replace(body, inputs=inputs, outputs=outputs, equations=tuple(_of_slice(e, names) for e in body.equations))
    steps = {names[v]: part * prod(v.type.shape[axis + 1 :]) for v, axis in at.items()}
    adds = any(v not in at for e in body.equations if sums_items(e) for v in e.outputs)
    return Slices(sliced, length // part, {names.get(v, v): v for v in values}, steps, adds)


def _of_slice(equation: Equation, names: dict[Variable, Variable]) -> Equation:
    e = renamed(equation, names)
    return replace(e, params={**e.params, "shape": e.outputs[0].type.shape}) if "shape" in e.params else e


def _is_next(v: Variable, axis: int, by_item: bool, count: int) -> bool:
    """Whether an axis is the first one of an item, or of a value that is not by item. Axes of length 1 do not count."""
    shape = v.type.shape
    if not by_item:
        return prod(shape[:axis]) == 1
    return axis > 0 and shape[0] == count and prod(shape[1:axis]) == 1


def _items_of(equation: Equation) -> list[Variable]:
    """The values that an equation reads or computes item by item."""
    read = [v for v, flag in zip(equation.inputs, item_rule(equation).flags, strict=True) if flag]
    return read if sums_items(equation) else [*read, *equation.outputs]


def _follows(equation: Equation, at: Mapping[Variable, int]) -> bool:
    """Whether each result is of the same slice as the arguments, or a sum over items and slices."""
    axes = equation.axes.undivided()
    read = {labels[at[v]] for v, labels in zip(equation.inputs, axes.arguments, strict=True) if v in at}
    for y, labels in zip(equation.outputs, axes.results, strict=True):
        if y in at and (not labels[at[y]] or read - {labels[at[y]]}):
            return False
        if y not in at and not (sums_items(equation) and len(read) == 1 and read <= axes.added):
            return False
    return True
