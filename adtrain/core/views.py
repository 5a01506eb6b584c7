"""Views: primitives whose output shares memory with an argument; and Programs by member, whose ends are views.

A Program by member is a function of one member's arrays, whose equations compute all members. Where arrays with an axis
of members become mapped values is the view `split_members`. Where mapped values become such arrays is the view
`stack_members` (see `Variable`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from math import prod
from typing import Any

import numpy as np

from adtrain.core import tree
from adtrain.core.array import Value
from adtrain.core.axes import along, whole
from adtrain.core.batching_rules import move_axes
from adtrain.core.primitive import Primitive, Trait, no_flops
from adtrain.core.program import Program, Variable
from adtrain.core.staging import Results, Symbol, keeps
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType, Shape
from adtrain.core.vmap import mapped_arguments


def _subview_reference(x: np.ndarray, start: int, shape: Shape) -> np.ndarray:
    return x.reshape(-1)[start : start + prod(shape)].reshape(shape)


subview_p: Primitive = Primitive(
    "subview",
    lambda x, start, shape: ArrayType(shape, x.dtype),
    _subview_reference,
    flops=no_flops,
    view=True,
    traits=(Trait.SUBVIEW,),
    axes=lambda x, start, shape: whole([x.ndim], [len(shape)]),
)

concat_view_p: Primitive = Primitive(
    "concat_view",
    lambda *xs: ArrayType((sum(x.shape[0] for x in xs), *xs[0].shape[1:]), xs[0].dtype),
    lambda *xs: np.concatenate(xs),
    flops=no_flops,
    view=True,
    traits=(Trait.CONCAT_VIEW,),
    axes=lambda *xs: along(xs[0].ndim, (0,), arguments=len(xs)),
)
"""``concat_view(*xs)``: the concatenation of the arguments along axis 0. The equations that compute them write into its
memory. Only the pass `place_views` makes this equation, where no copy is needed. It has no derivative."""


def subview(x: Value, start: int, shape: Shape) -> Value:
    """The consecutive elements of ``x`` from flat index ``start`` on, as an array of ``shape``.

    In a Program it shares the memory of ``x``. It has no derivative.
    """
    return bind(subview_p, x, start=start, shape=shape)


def _same(x: np.ndarray, **params: Any) -> np.ndarray:
    return x


split_members_p: Primitive = Primitive(
    "split_members",
    lambda x: ArrayType(x.shape[1:], x.dtype),
    _same,
    flops=no_flops,
    view=True,
    traits=(Trait.MEMBERS,),
    axes=".*->*",
)
"""A mapped value, from the array with the members along axis 0."""

stack_members_p: Primitive = Primitive(
    "stack_members",
    lambda x, members: ArrayType((members, *x.shape), x.dtype),
    _same,
    flops=no_flops,
    view=True,
    traits=(Trait.MEMBERS,),
    axes="*->.*",
)
"""The array with the members along axis 0, from a mapped value."""


def per_member(f: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
    """Like ``vmap(f, in_axes)``, but the Program keeps the equations of one member.

    `vmap` runs each operation for all members, by its batching rule. Here passes see the equations of one member, so
    the kernels of a member are chosen and fused without regard to the number of members. It is for functions that are
    staged with the passes `ALL_BY_MEMBER`. It has no derivative: take gradients inside ``f``.

    Raises (when called): the errors of `vmap`.
    """

    @wraps(f)
    def for_all_members(*args: Any) -> Any:
        leaves, axes, count = mapped_arguments(in_axes, args)
        given = [
            x if axis is None else bind(split_members_p, move_axes(x, axis, 0))
            for x, axis in zip(leaves, axes, strict=True)
        ]
        outputs, structure = tree.flatten(f(*tree.unflatten(tree.flatten(args)[1], given)))
        return tree.unflatten(structure, [_of_all(x, count) for x in outputs])

    return for_all_members


def _of_all(x: Value, count: int) -> Value:
    """A result with the members along axis 0. If it is the same for all, it is repeated."""
    if isinstance(x, Symbol) and x.variable.members:
        return bind(stack_members_p, x, members=count)
    return Value._ops.broadcast_to(x, (count, *x.shape))


@keeps(Results.EXACT)
def by_member(program: Program) -> Program:
    """``program`` without the views at its ends: its inputs and outputs are the mapped values themselves."""
    names: dict[Variable, Variable] = {}
    for v in program.inputs:
        readers = program.readers.get(v, ())
        if len(readers) == 1 and readers[0].primitive is split_members_p and v not in program.outputs:
            names[v] = readers[0].outputs[0]
    stacked = {e.outputs[0]: e.inputs[0] for e in program.equations if e.primitive is stack_members_p}
    results = {v: x for v, x in stacked.items() if v not in program.readers}
    removed = {*names.values(), *results}
    equations = tuple(e for e in program.equations if removed.isdisjoint(e.outputs))
    return replace(
        program,
        inputs=tuple(names.get(v, v) for v in program.inputs),
        equations=equations,
        outputs=tuple(results.get(v, v) for v in program.outputs),
        donated=frozenset(names.get(v, v) for v in program.donated),
    )
