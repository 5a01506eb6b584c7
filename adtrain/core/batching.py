"""The level of `vmap`: the trace that runs an operation once for all members, by the primitive's batching rule.

A member is one call of the mapped function. A mapped value differs between members. One level down it is one value,
which has the members along axis 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from adtrain.core.array import Value
from adtrain.core.batching_rules import by_axes, elementwise
from adtrain.core.errors import DTypeError, ShapeError
from adtrain.core.primitive import Primitive
from adtrain.core.trace import Trace, Tracer, bind
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
            if wrong := [type(x).__name__ for x in outputs if not isinstance(x, Value)]:
                raise DTypeError(f"{primitive.name}: its batching rule returned a {wrong[0]}, expected adtrain arrays")
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
