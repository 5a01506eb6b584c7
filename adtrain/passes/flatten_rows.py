"""Flatten rows: row-wise equations between products of (B * S, F) matrices get that shape too.

A linear layer on sequences (B, S, F) is a product of (B * S, F) between two reshapes. Its bias, activation, norms,
residual additions and their gradients work on rows of F elements. As equations on (B * S, F) they can join the product.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable, renamed
from adtrain.core.staging import Results, keeps
from adtrain.core.types import ArrayType, Shape
from adtrain.passes.fusion import elementwise
from adtrain.passes.simplify import remove_dead_code, reshape_equation, simplify_reshapes


@keeps(Results.EXACT)
def flatten_rows(program: Program) -> Program:
    """Rewrite equations over the leading axes of sequences to equations over rows, with reshapes around them.

    Leading axes are those that a reshape joins for a matrix product: (B, S) of (B, S, F). Elementwise equations, norms
    and sums of rows are rewritten, and sums over all rows. Equations that read
    only gathered rows keep their shape, so that they fuse with the gather.
    """
    leading = _leading_axes(program)
    if not leading:
        return program
    equations: list[Equation] = []
    broadcasts: dict[Variable, Equation] = {}
    gathered: set[Variable] = set()  # computed from gathered rows alone
    for e in program.equations:
        inputs = {v for v in e.inputs if v.type.shape}
        of_gather = elementwise(e) and not gathered.isdisjoint(inputs) and inputs <= gathered | broadcasts.keys()
        if e.has(Trait.BROADCAST):
            broadcasts[e.outputs[0]] = e
        elif e.has(Trait.GATHER) or of_gather:
            gathered.update(e.outputs)
        elif flat := _with_flat_broadcasts(e, leading, broadcasts):
            equations += flat
            continue
        equations.append(e)
    return remove_dead_code(simplify_reshapes(replace(program, equations=tuple(equations))))


def _with_flat_broadcasts(
    e: Equation, leading: set[Shape], broadcasts: dict[Variable, Equation]
) -> list[Equation] | None:
    """`_flattened` of an equation, preceded by flattened copies of the broadcasts that it reads.

    None if one of these does not work row by row.
    """
    flat = _flattened(e, leading)
    if flat is None:
        return None
    before = {}
    for v in e.inputs:
        if v in broadcasts and v.type.shape:
            copy = _flattened(broadcasts[v], leading)
            if copy is None:
                return None
            own = {w: w.like() for each in copy for w in each.outputs}
            before[v] = [renamed(each, own) for each in copy]
            flat = [renamed(each, {v: own[v]}) if each.outputs[0] is not v else each for each in flat]
    return [*(each for group in before.values() for each in group), *flat]


def _leading_axes(program: Program) -> set[Shape]:
    """The axes before the last one of arrays that are reshaped to or from a matrix of a product."""
    matrices = {v for e in program.equations if e.has(Trait.MATMUL) for v in (*e.inputs, *e.outputs)}
    found = set()
    for e in program.equations:
        if e.has(Trait.RESHAPE):
            (x,), (y,) = e.inputs, e.outputs
            for whole, flat in ((x, y), (y, x)):
                shape = whole.type.shape
                if flat in matrices and len(shape) > 2 and flat.type.shape == flat_shape(shape):
                    found.add(shape[:-1])
    return found


def flat_shape(shape: Shape) -> Shape:
    """The shape of the rows of sequences (B, S, F) as a matrix."""
    return (prod(shape[:-1]), *shape[-1:])


def _flattened(e: Equation, leading: set[Shape]) -> list[Equation] | None:
    """The equation over rows, and reshapes of its arguments and results; None if it does not work row by row."""
    along = "axes" in e.params and e.axes.leading and len(e.inputs) == 1
    whole = e.inputs[0].type.shape if along else e.outputs[0].type.shape
    if whole[:-1] not in leading:
        return None
    if along:
        axes = _flat_axes(e, len(whole))
        if axes is None:
            return None
        params = {**e.params, "axes": axes}
    elif elementwise(e):
        params = {**e.params, "shape": flat_shape(whole)} if "shape" in e.params else dict(e.params)
    else:
        return None
    shapes = [_row_shape(v.type.shape, whole[:-1]) for v in e.inputs]
    if None in shapes:
        return None
    inputs = [v if s is None or s == v.type.shape else _like(v, s) for v, s in zip(e.inputs, shapes, strict=True)]
    types = e.primitive.output_types([v.type for v in inputs], params)
    outputs = [v if t == v.type else v.like(t) for v, t in zip(e.outputs, types, strict=True)]
    before = [reshape_equation(e, v, w) for v, w in zip(e.inputs, inputs, strict=True) if v is not w]
    after = [reshape_equation(e, w, v) for v, w in zip(e.outputs, outputs, strict=True) if v is not w]
    return [*before, replace(e, inputs=tuple(inputs), outputs=tuple(outputs), params=params), *after]


def _flat_axes(e: Equation, ndim: int) -> tuple[int, ...] | None:
    """The axes of the same equation over rows, if it works by row, or reduces over all of them; otherwise None."""
    (labels,), axes = e.axes.arguments, e.params["axes"]
    if set(axes) <= {ndim - 1}:
        return (1,) * len(axes)
    return (0,) if labels[-1] and e.axes.results == (labels[-1:],) else None


def _row_shape(shape: Shape, leading: Shape) -> Shape | None:
    """The shape of an argument over rows; None if it is neither an array of rows nor the same for all rows."""
    if len(shape) <= 1:
        return shape
    if shape[:-1] == leading:
        return flat_shape(shape)
    return shape[-1:] if prod(shape[:-1]) == 1 else None


def _like(v: Variable, shape: Shape) -> Variable:
    return v.like(ArrayType(shape, v.type.dtype))
