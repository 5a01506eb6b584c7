"""Primitive: the unit of work. A name, a shape rule, a derivative, a cost, and an implementation per backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from adtrain.core.array import ArrayType, Value

Pullback: TypeAlias = Callable[[Any], Value]
"""Cotangent of the output to the cotangent of one argument. For several outputs it takes a tuple of cotangents, None
for an output that nothing depends on."""

VjpRule: TypeAlias = Callable[..., Pullback]
"""``rule(out, *args, **params) -> pullback``, staged: called at once on forward, so that the pullback it returns
holds on to the arrays it mentions and to no others."""


class Cost(NamedTuple):
    """Work done by one run of a primitive."""

    flops: int  # floating-point operations, a multiply-add counted as two
    bytes: int  # arguments read once and results written once


PRIMITIVES: dict[str, Primitive] = {}


@dataclass(frozen=True, eq=False)
class Primitive:
    """One kind of operation.

    Args:
        name: unique; what timings and Programs show.
        shape: shape rule ``(*arguments, **params) -> ArrayType``, or a tuple of them for several outputs. It sees
            only shapes and dtypes, and raises ShapeError or DTypeError.
        implementations: backend name to plain data or a function that the backend knows how to run; the reference,
            ``"cpu"``, is a function of NumPy arrays.
        vjp: one rule an argument (None: no derivative), or a function from argument position to rule for a
            primitive with any number of arguments. Rules call only public ops: the closure rule.
        flops: floating-point operations, from the same arguments as ``shape``; by default one for each element of
            the outputs.
        view: the output is its argument's memory, or no memory at all; it moves no bytes.
    """

    name: str
    shape: Callable[..., Any]
    implementations: Mapping[str, Any]
    vjp: Sequence[VjpRule | None] | Callable[[int], VjpRule] = ()
    flops: Callable[..., int] | None = None
    view: bool = False
    differentiable: bool = field(init=False)

    def __post_init__(self) -> None:
        if self.name in PRIMITIVES:
            raise ValueError(f"primitive {self.name!r} is defined twice")
        PRIMITIVES[self.name] = self
        object.__setattr__(self, "differentiable", callable(self.vjp) or any(rule is not None for rule in self.vjp))

    def rule(self, argument: int) -> VjpRule | None:
        """The vjp rule of one argument, or None where the output does not depend on it smoothly."""
        if callable(self.vjp):
            return self.vjp(argument)
        return self.vjp[argument] if argument < len(self.vjp) else None

    def output_types(self, args: Sequence[Any], params: Mapping[str, Any]) -> tuple[ArrayType, ...]:
        """The shape rule's answer, always as a tuple."""
        types = self.shape(*args, **params)
        return (types,) if isinstance(types, ArrayType) else types

    def cost(self, args: Sequence[Any], params: Mapping[str, Any]) -> Cost:
        """FLOPs and bytes of one run on arguments (arrays or ArrayTypes) of these shapes."""
        outputs = self.output_types(args, params)
        flops = self.flops(*args, **params) if self.flops else sum(out.size for out in outputs)
        moved = () if self.view else (*args, *outputs)
        return Cost(flops, sum(x.size * x.dtype.itemsize for x in moved))


def no_flops(*args: Any, **params: Any) -> int:
    """Cost of primitives that only move data."""
    return 0
