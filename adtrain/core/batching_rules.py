"""Batching rules that several primitives share: how `vmap` runs a primitive once for all members.

A rule is ``rule(op, mapped, *args, **params)``. ``op`` runs the primitive. ``mapped`` has a bool for each argument: a
mapped argument has the members along axis 0, another one is the same for all members. There is at least one mapped
argument and one member. The rule returns the output, or outputs, with the members along axis 0. It computes with
public operations and ``op``, so that it can be differentiated, mapped and staged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from adtrain.core.array import Value


def member_count(mapped: Sequence[bool], args: Sequence[Value]) -> int:
    """The number of members."""
    return args[mapped.index(True)].shape[0]


def all_mapped(mapped: Sequence[bool], args: Sequence[Value]) -> list[Value]:
    """The arguments with the members along axis 0. One that is the same for all members is repeated."""
    count = member_count(mapped, args)
    return [x if m else Value._ops.broadcast_to(x, (count, *x.shape)) for x, m in zip(args, mapped, strict=True)]


def loop(op: Callable[..., Any], mapped: Sequence[bool], /, *args: Value, **params: Any) -> Any:
    """Any primitive: one member after another."""
    outputs = [
        op(*(x[i] if m else x for x, m in zip(args, mapped, strict=True)), **params)
        for i in range(member_count(mapped, args))
    ]
    stack = Value._ops.stack
    return stack(outputs) if isinstance(outputs[0], Value) else tuple(map(stack, zip(*outputs, strict=True)))


def elementwise(op: Callable[..., Any], mapped: Sequence[bool], /, *args: Value, **params: Any) -> Any:
    """A primitive whose arguments have one shape, or are numbers of shape ()."""
    count = member_count(mapped, args)
    shape = max((x.shape[1:] if m else x.shape for x, m in zip(args, mapped, strict=True)), key=len)
    same = []
    for x, m in zip(args, mapped, strict=True):
        if m and x.ndim == 1:  # a number for each member
            x = Value._ops.reshape(x, (count,) + (1,) * len(shape))
        same.append(x if x.ndim == 0 else Value._ops.broadcast_to(x, (count, *shape)))
    return op(*same, **params)


def trailing_axes(op: Callable[..., Any], mapped: Sequence[bool], /, *args: Value, **params: Any) -> Any:
    """A primitive that works along the last axes, whatever the number of axes before them."""
    return op(*all_mapped(mapped, args), **params)


def shifted_axes(op: Callable[..., Any], mapped: Sequence[bool], /, *args: Value, **params: Any) -> Any:
    """A primitive that works along the axes in its parameter ``axis`` or ``axes``, which shift by one."""
    if "axis" in params:
        params["axis"] += 1
    else:
        params["axes"] = tuple(i + 1 for i in params["axes"])
    return op(*all_mapped(mapped, args), **params)


def folded(op: Callable[..., Any], mapped: Sequence[bool], /, *args: Value, **params: Any) -> Any:
    """A primitive that treats the items along axis 0 alike: the items of all members become one axis.

    A parameter ``shape`` is the shape of the output.
    """
    count = member_count(mapped, args)
    if "shape" in params:
        items, *rest = params["shape"]
        params["shape"] = (count * items, *rest)
    out = op(*map(fold, all_mapped(mapped, args)), **params)
    return unfold(out, count) if isinstance(out, Value) else tuple(unfold(x, count) for x in out)


def folded_beside(*weights: int) -> Callable[..., Any]:
    """`folded` for a primitive whose arguments at these positions, such as weights, serve all items.

    If one of these is mapped, members run one after another.
    """

    def rule(op: Callable[..., Any], mapped: Sequence[bool], /, *args: Value, **params: Any) -> Any:
        if any(mapped[i] for i in weights):
            return loop(op, mapped, *args, **params)
        items = [i for i in range(len(args)) if i not in weights]

        def of_items(*given: Value, **params: Any) -> Any:
            by_position = dict(zip(items, given, strict=True))
            return op(*(by_position.get(i, x) for i, x in enumerate(args)), **params)

        return folded(of_items, [mapped[i] for i in items], *(args[i] for i in items), **params)

    return rule


def fold(x: Value) -> Value:
    """Axes 0 and 1 as one axis."""
    return Value._ops.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))


def unfold(x: Value, count: int) -> Value:
    """Axis 0 as ``count`` members and their items."""
    return Value._ops.reshape(x, (count, x.shape[0] // count, *x.shape[1:]))


def move_axes(x: Value, source: int, destination: int, count: int = 1) -> Value:
    """``x`` with ``count`` neighbouring axes, the first of which is ``source``, moved to begin at ``destination``."""
    moved = range(source, source + count)
    order = [i for i in range(x.ndim) if i not in moved]
    order[destination:destination] = moved
    return Value._ops.transpose(x, order)
