"""A function of one member's arrays as one `per_member` equation, whose body is the Program of one member."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from adtrain.core import tree
from adtrain.core.array import Array, Value
from adtrain.core.batching_rules import move_axes
from adtrain.core.fused import per_member_p
from adtrain.core.program import Program
from adtrain.core.staging_trace import StagingTrace
from adtrain.core.trace import base_trace, bind
from adtrain.core.vmap import mapped_arguments


def per_member(f: Callable[..., Any], in_axes: Any = 0) -> Callable[..., Any]:
    """Like ``vmap(f, in_axes)``, but traced as one equation of the Program.

    `vmap` runs each operation for all members, by its batching rule. Here passes see the Program of one member, so the
    kernels of a member are chosen and fused without regard to the number of members. On a GPU the Program needs the
    passes `ALL_BY_MEMBER`. The equation has no derivative: take gradients inside ``f``.

    Raises (when called): the errors of `vmap`.
    """

    @wraps(f)
    def for_all_members(*args: Any) -> Any:
        leaves, axes, count = mapped_arguments(in_axes, args)
        stacked = [x if axis is None else move_axes(x, axis, 0) for x, axis in zip(leaves, axes, strict=True)]
        flags = tuple(axis is not None for axis in axes)
        body, structure, constants = _traced(f, args, stacked, flags)
        flags = (*flags, *(False for _ in constants))
        found = bind(per_member_p, *stacked, *constants, body=body, count=count, mapped=flags)
        return tree.unflatten(structure, [found] if isinstance(found, Value) else list(found))

    return for_all_members


def _traced(
    f: Callable[..., Any], args: tuple[Any, ...], leaves: list[Any], flags: tuple[bool, ...]
) -> tuple[Program, tree.TreeDef, list[Array]]:
    """The Program of one member, in which constants are further inputs; the structure of its results; the constants."""
    trace = StagingTrace()
    symbols = [trace.input(x) if not m else trace.member(x) for x, m in zip(leaves, flags, strict=True)]
    try:
        with base_trace(trace):
            outputs, structure = tree.flatten(f(*tree.unflatten(tree.flatten(args)[1], symbols)))
    finally:
        trace.live = False
    found = trace.program(outputs)
    inputs = (*found.inputs, *found.constants)
    return Program(inputs, {}, found.equations, found.outputs), structure, list(found.constants.values())
