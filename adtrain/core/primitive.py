"""Primitive: the unit of work. A name, a shape rule, a NumPy reference, a derivative, a cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple, TypeAlias

from adtrain.core.array import Value
from adtrain.core.types import ArrayType

Pullback: TypeAlias = Callable[[Any], Value]
"""Cotangent of the output to the cotangent of one argument. For several outputs it takes a tuple of cotangents, None
for an output that nothing depends on."""

VjpRule: TypeAlias = Callable[..., Pullback]
"""``rule(out, *args, **params) -> pullback``, staged: called at once on forward, so that the pullback it returns
holds on to the arrays it mentions and to no others."""


class Cost(NamedTuple):
    """Work done by one run of a primitive."""

    flops: int  # floating-point operations, a multiply-add counted as two
    bytes: int  # elements of arguments read once, and results written once


class Trait(Enum):
    """What passes need to know of a primitive beyond its cost, so that they ask for a property and not for a name."""

    RESHAPE = auto()
    """The output has the argument's elements in the same order; it needs no kernel and no memory."""
    BROADCAST = auto()
    """The output repeats its argument, or one number; a reader can read the argument in its place."""
    MATMUL = auto()
    """A matrix product; an epilogue can be fused into it."""
    CONVOLUTION = auto()
    """A convolution whose output are images; an epilogue can be fused into it."""
    REDUCTION = auto()
    """Combines the elements along the parameter ``axes``."""
    GATHER = auto()
    """Reads the slices of its first argument that its second one names, along the parameter ``axis``."""
    ALONG_AXIS = auto()
    """Works along the parameter ``axis`` or ``axes``, independently of the other axes."""
    MAX_POOL = auto()
    """Max pooling; its outputs are the maxima and their positions."""
    MAX_POOL_GRAD = auto()
    """Puts a pooled gradient where the maxima were, and zeros elsewhere."""


PRIMITIVES: dict[str, Primitive] = {}


@dataclass(frozen=True, eq=False)
class Primitive:
    """One kind of operation.

    Args:
        name: unique; what timings and Programs show.
        shape: shape rule ``(*arguments, **params) -> ArrayType``, or a tuple of them for several outputs. It sees
            only shapes and dtypes, and raises ShapeError or DTypeError.
        reference: the same on NumPy arrays; what eager CPU code runs and every kernel is tested against. Kernels are
            registered by name, see `core/registry.py`.
        vjp: one rule an argument (None: no derivative), or a function from argument position to rule for a
            primitive with any number of arguments. Rules call only public ops: the closure rule.
        flops: floating-point operations, from the same arguments as ``shape``; by default one for each element of
            the outputs.
        reads: for each argument how many of its elements are read, from the same arguments as ``shape``; by default
            all of them. A gather reads those at its indices.
        view: the output is its argument's memory, or no memory at all; it moves no bytes.
        expression: for an elementwise primitive, one element of the output as a C expression (and CUDA C++) in the
            variables a, b, c: the elements of the arguments. T is their type (the last one's, where they differ), U
            the output's, {name} a parameter. Where the text depends on the parameters, a function of them.
        traits: properties that passes ask for.
    """

    name: str
    shape: Callable[..., Any]
    reference: Callable[..., Any]
    vjp: Sequence[VjpRule | None] | Callable[[int], VjpRule] = ()
    flops: Callable[..., int] | None = None
    reads: Callable[..., Sequence[int]] | None = None
    view: bool = False
    expression: str | Callable[..., str] | None = None
    traits: tuple[Trait, ...] = ()
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
        counts = self.elements_read(args, params)
        read = sum(n * x.dtype.itemsize for x, n in zip(args, counts, strict=True))
        written = 0 if self.view else sum(out.size * out.dtype.itemsize for out in outputs)
        return Cost(flops, read + written)

    def elements_read(self, args: Sequence[Any], params: Mapping[str, Any]) -> Sequence[int]:
        """How many elements of each argument one run reads from memory."""
        if self.view:
            return [0 for _ in args]
        return self.reads(*args, **params) if self.reads else [x.size for x in args]


def no_flops(*args: Any, **params: Any) -> int:
    """Cost of primitives that only move data."""
    return 0
