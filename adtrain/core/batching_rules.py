"""Batching rules that several primitives share: how `vmap` runs a primitive once for all members.

A rule is ``rule(op, mapped, *args, **params)``. ``op`` runs the primitive. ``mapped`` has a bool for each argument: a
mapped argument has the members along axis 0, another one is the same for all members. There is at least one mapped
argument and one member. The rule returns the output, or outputs, with the members along axis 0. It computes with
public operations and ``op``, so that it can be differentiated, mapped and staged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adtrain.core.array import Value
from adtrain.core.axes import Items, items
from adtrain.core.primitive import Primitive
from adtrain.core.static_key import params_key
from adtrain.core.types import ArrayType


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


def by_axes(
    primitive: Primitive, op: Callable[..., Any], mapped: Sequence[bool], /, *args: Value, **params: Any
) -> Any:
    """Any primitive, by its `Axes`.

    The members are one more leading axis of all values. If there can be none, but the items along axis 0 are treated
    alike, the items of all members become those of one. Otherwise one member runs after another.
    """
    types = tuple(ArrayType(x.shape[1:] if m else x.shape, x.dtype) for x, m in zip(args, mapped, strict=True))
    key = primitive, types, params_key(params)
    if key not in _WAYS:
        if len(_WAYS) == MAX_WAYS:
            _WAYS.clear()
        _WAYS[key] = _way(primitive, types, params)
    leading, found = _WAYS[key]
    if leading:
        return op(*all_mapped(mapped, args), **_shifted(params))
    if found is None or any(m and not flag for m, flag in zip(mapped, found.flags, strict=True)):
        return loop(op, mapped, *args, **params)
    return _folded(op, mapped, found.flags, *args, **params)


MAX_WAYS = 1 << 12
_WAYS: dict[Any, tuple[bool, Items | None]] = {}
"""What `_way` has returned."""


def _way(primitive: Primitive, types: Sequence[ArrayType], params: Mapping[str, Any]) -> tuple[bool, Items | None]:
    """Whether values of these types may have one more leading axis; how the primitive works item by item."""
    outputs = primitive.output_types(types, params)
    axes = primitive.related_axes(types, params, outputs)
    found = items(axes, [x.shape for x in types], [x.shape for x in outputs])
    if not axes.leading:
        return False, found
    of_two = primitive.related_axes([ArrayType((2, *x.shape), x.dtype) for x in types], _shifted(params))
    return of_two.renamed() == axes.with_leading().renamed(), found


def _shifted(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters for values with one more leading axis. An axis that counts from the last one stays as it is."""

    def shifted(axis: Any) -> Any:
        if isinstance(axis, tuple):
            return tuple(map(shifted, axis))
        return axis + 1 if isinstance(axis, int) and axis >= 0 else axis

    return {name: shifted(value) if name in ("axis", "axes") else value for name, value in params.items()}


def _folded(
    op: Callable[..., Any], mapped: Sequence[bool], by_item: Sequence[bool], /, *args: Value, **params: Any
) -> Any:
    """The items of all members as those of one. A parameter ``shape`` is the shape of the output."""
    count = member_count(mapped, args)
    if "shape" in params:
        length, *rest = params["shape"]
        params["shape"] = (count * length, *rest)
    own = [i for i, flag in enumerate(by_item) if flag]
    repeated = dict(zip(own, all_mapped([mapped[i] for i in own], [args[i] for i in own]), strict=True))
    out = op(*(fold(repeated[i]) if i in repeated else x for i, x in enumerate(args)), **params)
    return unfold(out, count) if isinstance(out, Value) else tuple(unfold(x, count) for x in out)


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
