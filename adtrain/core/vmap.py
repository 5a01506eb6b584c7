"""vmap: a function of one member's arrays, run for all members at once.

A member is one call of the mapped function. A mapped value differs between members. One level down it is one value,
which has the members along axis 0. The trace runs an operation once for all members, by the primitive's batching rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import numpy as np

from adtrain.core import tree
from adtrain.core.array import NUMBERS, Value, array, returned_no_array, type_with_article
from adtrain.core.batching_rules import by_axes, elementwise, move_axes
from adtrain.core.errors import DTypeError, OptionError, ShapeError, with_article
from adtrain.core.options import is_integer, require_function, shown
from adtrain.core.primitive import Primitive
from adtrain.core.trace import Trace, Tracer, bind, new_level
from adtrain.core.types import ArrayType


class BatchTracer(Tracer):
    """A mapped value, with the shape that it has in one member. ``primal`` has the members along axis 0."""

    __slots__ = ("device", "dtype", "primal", "shape", "trace")

    def __init__(self, trace: Trace, primal: Value) -> None:
        self.trace = trace
        self.primal = primal
        self.shape = primal.shape[1:]
        self.dtype = primal.dtype
        self.device = primal.device


class BatchTrace:
    """Runs each operation one level down, for ``size`` members at once."""

    def __init__(self, level: int, size: int) -> None:
        self.level = level
        self.size = size
        self.live = True

    def maps(self, x: Any) -> bool:
        """Whether ``x`` differs between the members of this trace."""
        return isinstance(x, BatchTracer) and x.trace is self

    def lower(self, x: Any) -> Any:
        """``x`` one level down; a mapped value with the members along axis 0."""
        return x.primal if self.maps(x) else x

    def members(self, x: Value) -> Value:
        """``x`` one level down with the members along axis 0; if it is not mapped, it is repeated."""
        return self.lower(x) if self.maps(x) else Value._ops.broadcast_to(x, (self.size, *x.shape))

    def process(self, primitive: Primitive, args: Sequence[Value], params: Mapping[str, Any]) -> Any:
        types = primitive.output_types(args, params)  # its errors name the shapes of one member
        if self.size:
            mapped = tuple(map(self.maps, args))
            out = batching_rule(primitive)(partial(bind, primitive), mapped, *map(self.lower, args), **params)
            outputs = tuple(out) if isinstance(out, (tuple, list)) else (out,)
            if wrong := [type_with_article(x) for x in outputs if not isinstance(x, Value)]:
                raise DTypeError(f"{primitive.name}: its batching rule returned {wrong[0]}, expected adtrain arrays")
        else:
            outputs = tuple(Value._ops.zeros((0, *t.shape), t.dtype, args[0].device) for t in types)
        found = [ArrayType(x.shape, x.dtype) for x in outputs]
        expected = [ArrayType((self.size, *t.shape), t.dtype) for t in types]
        if found != expected:
            shown, wanted = (", ".join(map(str, each)) for each in (found, expected))
            raise ShapeError(f"{primitive.name}: its batching rule returned {shown}, expected {wanted}")
        tracers = tuple(BatchTracer(self, x) for x in outputs)
        return tracers[0] if len(tracers) == 1 else tracers


def batching_rule(primitive: Primitive) -> Callable[..., Any]:
    """The rule by which `vmap` runs a primitive: its own, `elementwise` for elementwise ones, or else `by_axes`."""
    return primitive.batch or (partial(by_axes, primitive) if primitive.expression is None else elementwise)


def vmap(
    f: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0, axis_size: int | None = None
) -> Callable[..., Any]:
    """A function that runs ``f`` for each member, the entries along an axis of its arguments, and stacks the results.

    ``f`` runs once, on values that stand for one member, and each operation runs once for all members, by its batching
    rule. It composes with all other transformations in any order: ``vmap(grad(loss), (None, 0, 0))(params, x, y)`` are
    the gradients of each example.

    A random state that all members share gives all of them the same numbers. With a state for each member (an array of
    states, of shape (members, 4)) a member has the numbers that it would have alone.

    Args:
        f: function of trees of arrays to a tree of arrays.
        in_axes: for each positional argument the axis of its arrays along which the members are; None: all members
            share it. An entry is an integer, None, or a tree of these that begins as the argument does; one integer
            serves all arguments. Keyword arguments are shared.
        out_axes: likewise the axis of the members in each result. None: a result that does not depend on the member.
        axis_size: the number of members, needed if no argument is mapped.

    Raises (when called):
        ShapeError: mapped axes have different lengths, an axis is out of range, or a result that differs between
            members has ``out_axes`` None.
        OptionError: ``in_axes`` or ``out_axes`` does not fit the trees, or there is neither a mapped argument nor
            ``axis_size``.
        DTypeError: a number is mapped, or ``f`` returns something other than arrays.
    """
    require_function("vmap", f)
    if axis_size is not None and not is_integer(axis_size, 0):
        raise OptionError(f"vmap: axis_size is {shown(axis_size)}, expected an integer, at least 0")

    @wraps(f)
    def for_all_members(*args: Any, **options: Any) -> Any:
        leaves, axes, places = _mapped_leaves(in_axes, args)
        trace = BatchTrace(new_level(), _size(axis_size, leaves, axes, places))
        try:
            inputs = [
                x if axis is None else BatchTracer(trace, move_axes(x, axis, 0))
                for x, axis in zip(leaves, axes, strict=True)
            ]
            out = f(*tree.unflatten(tree.flatten(args)[1], inputs), **options)
        finally:
            trace.live = False
        outputs, structure = tree.flatten(out)
        found = tree.spread_prefix(out_axes, structure)
        if found is None:
            raise OptionError(_no_prefix("out_axes", out_axes, "the result", structure))
        names = [_place("result", path) for path in tree.paths(out)]
        return tree.unflatten(structure, [_result(trace, *each) for each in zip(outputs, found, names, strict=True)])

    return for_all_members


def mapped_arguments(in_axes: Any, args: tuple[Any, ...]) -> tuple[list[Any], list[int | None], int]:
    """The leaves of the arguments, the axis of the members in each (None: shared), and the number of members."""
    leaves, axes, places = _mapped_leaves(in_axes, args)
    return leaves, axes, _size(None, leaves, axes, places)


def _mapped_leaves(in_axes: Any, args: tuple[Any, ...]) -> tuple[list[Any], list[int | None], list[str]]:
    """The leaves of the arguments, with the axis of the members in each (from 0; None: shared), and its name."""
    if isinstance(in_axes, (tuple, list)) and len(in_axes) != len(args):
        raise OptionError(f"vmap: found {len(in_axes)} in_axes for {len(args)} arguments, expected one for each")
    prefixes = in_axes if isinstance(in_axes, (tuple, list)) else [in_axes] * len(args)
    device = next((x.device for x in tree.leaves(args) if isinstance(x, Value)), "cpu")
    leaves: list[Any] = []
    axes: list[int | None] = []
    places: list[str] = []
    for i, (prefix, arg) in enumerate(zip(prefixes, args, strict=True)):
        found, structure = tree.flatten(arg)
        spread = tree.spread_prefix(prefix, structure)
        if spread is None:
            raise OptionError(_no_prefix(f"in_axes[{i}]", prefix, f"argument {i}", structure))
        names = [_place(f"argument {i}", path) for path in tree.paths(arg)]
        for x, axis, name in zip(found, spread, names, strict=True):
            x = array(x, device=device) if isinstance(x, np.ndarray) and axis is not None else x
            leaves.append(x)
            axes.append(None if axis is None else _input_axis(x, axis, name))
            places.append(name)
    return leaves, axes, places


def _input_axis(x: Any, axis: Any, place: str) -> int:
    if not isinstance(x, Value):
        kind = with_article("number" if isinstance(x, NUMBERS) else type(x).__name__)
        raise DTypeError(f"vmap: {place} is {kind}, which has no axis; make it an array, or share it by in_axes None")
    return _checked_axis("in_axes", axis, x.shape, place)


def _checked_axis(option: str, axis: Any, shape: Sequence[int], place: str) -> int:
    """``axis`` from 0."""
    if not is_integer(axis, None):
        raise OptionError(f"vmap: {option} has {shown(axis)} for {place}, expected an integer or None")
    if not -len(shape) <= axis < len(shape):
        raise ShapeError(f"vmap: {option} has axis {axis} for {place}, which is out of range for shape {tuple(shape)}")
    return int(axis) % len(shape)


def _size(axis_size: int | None, leaves: Sequence[Any], axes: Sequence[int | None], places: Sequence[str]) -> int:
    """The number of members."""
    size, origin = axis_size, "axis_size"
    for x, axis, place in zip(leaves, axes, places, strict=True):
        if axis is None:
            continue
        here = f"axis {axis} of {place}"
        if size is None:
            size, origin = x.shape[axis], here
        if x.shape[axis] != size:
            raise ShapeError(
                f"vmap: found {size} members ({origin}) and {x.shape[axis]} ({here}), expected equally many"
            )
    if size is None:
        raise OptionError("vmap: in_axes maps no array; give an argument an axis, or give axis_size")
    return int(size)


def _result(trace: BatchTrace, x: Any, axis: Any, place: str) -> Value:
    """A result with the members along ``axis``; for None one that is the same for all."""
    if not isinstance(x, Value):
        raise returned_no_array("vmap", x)
    if axis is not None:
        members = trace.members(x)
        return move_axes(members, 0, _checked_axis("out_axes", axis, members.shape, place))
    if trace.maps(x):
        raise ShapeError(f"vmap: {place} differs between members, but out_axes has None for it; give it an axis")
    return x


def _no_prefix(option: str, prefix: Any, place: str, structure: tree.TreeDef) -> str:
    return (
        f"vmap: {option} is {shown(prefix)}, expected an integer, None, or a tree of them that begins as {place} does: "
        f"{structure}"
    )


def _place(name: str, path: str) -> str:
    return f"{name}, {path}" if path else name
