"""Primitive: an operation. It has a name, a shape rule, a NumPy reference, a derivative and a cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple, TypeAlias

from adtrain.core.array import Value
from adtrain.core.axes import Axes, aligned, parsed, whole
from adtrain.core.errors import ShapeError
from adtrain.core.types import ArrayType

Pullback: TypeAlias = Callable[[Any], Value]
"""From the cotangent of the output to the cotangent of one argument. With several outputs it takes a tuple of
cotangents, with None for an output that is not used."""

VjpRule: TypeAlias = Callable[..., Pullback]
"""``rule(out, *args, **params) -> pullback``, called in the forward pass. The residuals are the arrays that the
pullback refers to; no others stay in memory."""

Pull: TypeAlias = Callable[[Sequence[Any]], Sequence[Value | None]]
"""From the cotangents of all outputs, None for one that is not used, to those of some arguments."""

MOST_BYTES = 2**63
"""NumPy and kernels count bytes in signed 64-bit integers."""

CHANNELS_LAST, BFLOAT16 = "_channels_last", "_bfloat16"
"""Ends of the names of primitives for images that are channels last, and for arrays of bfloat16."""


class Cost(NamedTuple):
    """Work done by one run of a primitive."""

    flops: int  # floating-point operations; a multiply-add counts as two
    bytes: int  # each element read and each result written, once


class Trait(Enum):
    """Properties of primitives that passes ask for, instead of names."""

    RESHAPE = auto()
    """The output has the argument's elements in the same order. It needs no kernel and no memory of its own."""
    SUBVIEW = auto()
    """The output is consecutive elements of the argument, in its memory. ``start`` is the index of the first one."""
    CONCAT_VIEW = auto()
    """The output is the concatenation of the arguments, which are computed in its memory."""
    BROADCAST = auto()
    """The output repeats its argument, or one number. Other equations can read the argument in its place."""
    MEMBERS = auto()
    """The output has the memory of its argument. One of them is mapped, the other one has the members along axis 0."""
    MATMUL = auto()
    """A matrix product; an epilogue can be fused into it."""
    CONVOLUTION = auto()
    """A convolution with images as its output; an epilogue can be fused into it."""
    REDUCTION = auto()
    """Combines the elements along the parameter ``axes``."""
    GATHER = auto()
    """Selects slices of its first argument along the parameter ``axis``, at the indices in its second."""
    MAX_POOL = auto()
    """Max pooling. The outputs are the maxima and their positions."""
    MAX_POOL_GRAD = auto()
    """The gradient of max pooling: the cotangent at the positions of the maxima, zeros elsewhere."""
    COLLECTIVE = auto()
    """Exchanges its argument with other ranks. All ranks run such equations in the same order."""
    SHARD_EXCHANGE = auto()
    """Exchanges its argument with other shards of the batch. A training step replaces it: see `training.sharding`."""
    RECURRENT = auto()
    """Takes the steps of a recurrent network. The number of sequences decides on the kernel."""
    UPDATE = auto()
    """The output is the first argument with elements replaced by those of the second one. It may have the memory of the
    first argument; then kernels write the replaced elements only."""
    WIDENING = auto()
    """Converts an array to a wider type. It is fused with the equations that read its output, not with the one that
    computes its argument, so that memory holds the narrow type."""
    BARRIER = auto()
    """The outputs are the arguments. Passes do not merge equations before it with equations after it."""
    LINEAR = auto()
    """The output is linear in all arguments of floating point together. Taylor mode applies it to coefficients."""
    BILINEAR = auto()
    """The output is linear in each of the two arguments. Taylor mode uses Leibniz' rule."""


VIEWS = frozenset({Trait.RESHAPE, Trait.SUBVIEW, Trait.CONCAT_VIEW, Trait.MEMBERS})
"""The traits of primitives whose output shares memory with an argument, so that they need no kernel."""

PRIMITIVES: dict[str, Primitive] = {}


@dataclass(frozen=True, eq=False)
class Primitive:
    """An operation.

    Args:
        name: unique; timings and Programs show it.
        shape: shape rule ``(*arguments, **params) -> ArrayType``, or a tuple of types for several outputs. It reads
            shapes and dtypes only, and raises ShapeError or DTypeError.
        reference: ``(*arguments, **params)`` on NumPy arrays. Eager code on the CPU runs it, and kernels are tested
            against it. Kernels are registered by name, see `adtrain.core.kernel`.
        vjp: a rule for each argument (None: no derivative). For any number of arguments a function from an argument's
            position to its rule. Rules call public ops only, so that they can be differentiated again.
        flops: floating-point operations, a function of the same arguments as ``shape``. By default one for each element
            of the outputs.
        reads: for each argument the number of elements read, a function of the same arguments as ``shape``. By default
            all; a gather reads those at its indices.
        view: the output shares its argument's memory or has none, so no bytes are moved.
        expression: for an elementwise primitive, an element of the output as an expression in C and CUDA C++. a, b, c
            are the elements of the arguments. T is the type of the last argument, U that of the output, {name} the
            value of a parameter. A function of the parameters where the text depends on them.
        traits: see `Trait`.
        joint_vjp: in place of ``vjp``, one rule for all arguments. Its pullback returns a tuple with one cotangent, or
            None, for each argument.
        batch: how `vmap` runs it for all members at once, see `adtrain.core.batching_rules`. By default it follows from
            ``axes``; where it does not, the members run one after another.
        axes: how the axes of the outputs relate to those of the arguments: a text such as "*mk,kn->*mn"
            (`adtrain.core.axes.parsed`), or a function of the same arguments as ``shape`` that returns a text or an
            `Axes`. By default those of an elementwise primitive are aligned, and those of another one not related.
        composition: ``(*arguments, **params)`` to the outputs as a composition of public operations, by which forward
            and Taylor mode differentiate it, and reverse mode if there is no ``vjp`` and no ``joint_vjp``. It may leave
            out the last outputs, which then have no derivative.
        taylor: a rule for Taylor coefficients, where the rules of `adtrain.core.taylor` would compute more than is
            needed: ``(trace, k, out, *arguments, **params)`` to the coefficient of t^k, k > 0, of the one output.

    Raises:
        ValueError: there is a primitive of that name.
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
    joint_vjp: Callable[..., Callable[[Any], Sequence[Value | None]]] | None = None
    batch: Callable[..., Any] | None = None
    axes: str | Callable[..., str | Axes] | None = None
    composition: Callable[..., Any] | None = None
    taylor: Callable[..., Value | None] | None = None
    differentiable: bool = field(init=False)
    by_composition: Callable[..., Any] | None = field(init=False)
    """The composition, if there are no other rules for the derivatives."""

    def __post_init__(self) -> None:
        if self.name in PRIMITIVES:
            raise ValueError(f"primitive {self.name!r} is defined twice")
        PRIMITIVES[self.name] = self
        separate = callable(self.vjp) or any(rule is not None for rule in self.vjp)
        object.__setattr__(self, "differentiable", separate or bool(self.joint_vjp or self.composition))
        object.__setattr__(self, "by_composition", None if self.joint_vjp or self.vjp else self.composition)

    def rule(self, argument: int) -> VjpRule | None:
        """The vjp rule of one argument; None where there is no derivative."""
        if callable(self.vjp):
            return self.vjp(argument)
        return self.vjp[argument] if argument < len(self.vjp) else None

    def pullback(self, out: Any, args: Sequence[Value], params: Mapping[str, Any], positions: Sequence[int]) -> Pull:
        """The pullback to the arguments at these positions, by the rules. ``out`` is a tuple for several outputs."""
        if self.joint_vjp is not None:
            return _joint_pull(self.joint_vjp(out, *args, **params), isinstance(out, Value), positions)
        pullbacks: list[Pullback | None] = []
        for i in positions:
            rule = self.rule(i)
            pullbacks.append(None if rule is None else rule(out, *args, **params))
        return _pull(pullbacks, isinstance(out, Value))

    def output_types(self, args: Sequence[Any], params: Mapping[str, Any]) -> tuple[ArrayType, ...]:
        """The types of the outputs, by the shape rule, which may raise ShapeError or DTypeError.

        Raises:
            ShapeError: an output has more bytes than addresses can count.
        """
        found = self.shape(*args, **params)
        types = (found,) if isinstance(found, ArrayType) else found
        for x in types:
            if math.prod(n or 1 for n in x.shape) * x.dtype.itemsize >= MOST_BYTES:
                raise ShapeError(f"{self.name}: found the result {x}, expected one of fewer than 2^63 bytes")
        return types

    def related_axes(
        self, args: Sequence[Any], params: Mapping[str, Any], outputs: Sequence[ArrayType] | None = None
    ) -> Axes:
        """How the axes of the outputs relate to those of such arguments (arrays or ArrayTypes).

        Args:
            outputs: their types, where these are known.

        Raises:
            ShapeError: the primitive's ``axes`` do not fit its arguments and outputs.
        """
        given = tuple([x.shape for x in args])
        found = tuple([x.shape for x in (self.output_types(args, params) if outputs is None else outputs)])
        ranks = tuple(map(len, given)), tuple(map(len, found))
        if self.axes is None:
            return whole(*ranks) if self.expression is None else aligned(given, found)
        stated = self.axes(*args, **params) if callable(self.axes) else self.axes
        axes = parsed(stated, *ranks) if isinstance(stated, str) else stated
        if not isinstance(axes, Axes) or _ranks(axes) != ranks:
            shapes = " -> ".join(", ".join(map(str, side)) for side in (given, found))
            raise ShapeError(f"{self.name}: axes {stated!r} do not fit the shapes {shapes}")
        return axes

    def cost(
        self,
        args: Sequence[Any],
        params: Mapping[str, Any],
        counts: Sequence[int] | None = None,
        outputs: Sequence[ArrayType] | None = None,
    ) -> Cost:
        """FLOPs and bytes of one run on such arguments (arrays or ArrayTypes).

        Args:
            counts: its `elements_read`, where these are known.
            outputs: their types, where these are known.
        """
        outputs = self.output_types(args, params) if outputs is None else outputs
        flops = self.flops(*args, **params) if self.flops else sum(out.size for out in outputs)
        counts = self.elements_read(args, params) if counts is None else counts
        read = sum(n * x.dtype.itemsize for x, n in zip(args, counts, strict=True))
        changed = args[1:2] if Trait.UPDATE in self.traits else outputs
        written = 0 if self.view else sum(x.size * x.dtype.itemsize for x in changed)
        return Cost(flops, read + written)

    def elements_read(self, args: Sequence[Any], params: Mapping[str, Any]) -> Sequence[int]:
        """How many elements of each argument one run reads from memory."""
        if self.view:
            return [0 for _ in args]
        return self.reads(*args, **params) if self.reads else [x.size for x in args]


def _joint_pull(pullback: Callable[[Any], Sequence[Value | None]], single: bool, positions: Sequence[int]) -> Pull:
    def pull(cts: Sequence[Any]) -> list[Value | None]:
        found = pullback(cts[0] if single else tuple(cts))
        return [found[i] for i in positions]

    return pull


def _pull(pullbacks: Sequence[Pullback | None], single: bool) -> Pull:
    def pull(cts: Sequence[Any]) -> list[Value | None]:
        given = cts[0] if single else tuple(cts)
        return [None if each is None else each(given) for each in pullbacks]

    return pull


def _ranks(axes: Axes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of axes of arguments and results."""
    return tuple(map(len, axes.arguments)), tuple(map(len, axes.results))


def no_flops(*args: Any, **params: Any) -> int:
    """Cost of primitives that only move data."""
    return 0
