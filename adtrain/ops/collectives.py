"""Exchanges between ranks, and sums over ranks and shards in a fixed order.

A derivative is that of the sum of all ranks' results. So if several ranks receive a value, its cotangent is the sum of
their cotangents. The names are those of MPI and NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from adtrain.core import communicator
from adtrain.core.array import Value
from adtrain.core.axes import Axes, letters
from adtrain.core.errors import AdtrainError, ShapeError
from adtrain.core.options import checked_options
from adtrain.core.primitive import Primitive, Trait, no_flops
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType
from adtrain.ops.common import ArrayLike, as_value, reshape
from adtrain.ops.shape import slice, transpose

__all__ = ["all_gather", "all_reduce", "all_to_all", "gather_shards"]

Addend = TypeVar("Addend", Value, np.ndarray)


def _all_to_all_shape(x: Any, ranks: int) -> ArrayType:
    if not x.shape or x.shape[0] != ranks:
        raise ShapeError(f"all_to_all: found shape {x.shape}, expected {ranks} items along axis 0, one for each rank")
    return ArrayType(x.shape, x.dtype)


def _exchanged_by_member(op: Callable[..., Value], mapped: Sequence[bool], x: Value, ranks: int) -> Value:
    """The batching rule of an exchange. In `x` the members are at axis 0, the ranks at axis 1."""
    swapped = (1, 0, *range(2, x.ndim))
    return transpose(op(transpose(x, swapped), ranks=ranks), swapped)


def _gathered_by_member(op: Callable[..., Value], mapped: Sequence[bool], x: Value, ranks: int) -> Value:
    return transpose(op(x, ranks=ranks), (1, 0, *range(2, x.ndim + 1)))


all_to_all_p: Primitive = Primitive(
    "all_to_all",
    _all_to_all_shape,
    lambda x, ranks: communicator.all_exchanged(x),
    [lambda out, x, ranks: lambda ct: bind(all_to_all_p, ct, ranks=ranks)],
    no_flops,
    traits=(Trait.COLLECTIVE, Trait.LINEAR),
    batch=_exchanged_by_member,
    axes=".*->.*",
)
all_gather_p: Primitive = Primitive(
    "all_gather",
    lambda x, ranks: ArrayType((ranks, *x.shape), x.dtype),
    lambda x, ranks: communicator.all_gathered(x),
    [lambda out, x, ranks: lambda ct: tree_sum(bind(all_to_all_p, ct, ranks=ranks))],
    no_flops,
    traits=(Trait.COLLECTIVE, Trait.LINEAR),
    batch=_gathered_by_member,
    axes="*->.*",
)


def all_gather(x: ArrayLike) -> Value:
    """``x`` of every rank along a new axis 0, in the order of the ranks."""
    return bind(all_gather_p, as_value(x), ranks=communicator.current().size)


def all_to_all(x: ArrayLike) -> Value:
    """Item r of the result is the item that rank r has for this rank: its ``x[rank]``.

    Raises:
        ShapeError: axis 0 has another length than the number of ranks.
    """
    return bind(all_to_all_p, as_value(x), ranks=communicator.current().size)


def all_reduce(x: ArrayLike) -> Value:
    """The sum of ``x`` over all ranks, the same bits on each: see `tree_sum`."""
    return tree_sum(all_gather(x))


def tree_sum(x: Value) -> Value:
    """The sum over axis 0 in a binary tree of neighbours: (x0 + x1) + (x2 + x3).

    For a length that is a power of two, sums of halves, quarters and so on are sums in the same tree.
    """
    return pairwise_sum([_item(x, i) for i in range(x.shape[0])])


def pairwise_sum(values: Sequence[Addend]) -> Addend:
    """The sum of values in the tree of `tree_sum`."""
    rest = list(values)
    while len(rest) > 1:
        pairs = [a + b for a, b in zip(rest[::2], rest[1::2], strict=False)]
        rest = pairs + rest[2 * len(pairs) :]
    return rest[0]


def _item(x: Value, i: int) -> Value:
    if x.shape[0] == 1:
        return reshape(x, x.shape[1:])
    starts, stops = [i, *[0] * (x.ndim - 1)], [i + 1, *x.shape[1:]]
    return reshape(slice(x, starts, stops), x.shape[1:])


def _gathered_shards(x: Any, shards: int) -> Any:
    _check_one_shard_per_rank(shards)
    return communicator.all_gathered(x)


def _summed_shards(x: Any, shards: int) -> Any:
    _check_one_shard_per_rank(shards)
    return pairwise_sum(list(communicator.all_exchanged(x)))


def _check_one_shard_per_rank(shards: int) -> None:
    if communicator.current().size != shards:
        raise AdtrainError(
            f"gather_shards: found {communicator.current().size} ranks and {shards} shards, expected one shard per "
            "rank, as outside of a training step"
        )


gather_shards_p: Primitive = Primitive(
    "gather_shards",
    lambda x, shards: ArrayType((shards, *x.shape), x.dtype),
    _gathered_shards,
    [lambda out, x, shards: lambda ct: bind(sum_shards_p, ct, shards=shards)],
    no_flops,
    traits=(Trait.SHARD_EXCHANGE, Trait.LINEAR),
    axes="*->.*",
)
"""(x; shards): an all-gather of shards. See `gather_shards`."""

sum_shards_p: Primitive = Primitive(
    "sum_shards",
    lambda x, shards: ArrayType(x.shape[1:], x.dtype),
    _summed_shards,
    [lambda out, x, shards: lambda ct: bind(gather_shards_p, ct, shards=shards)],
    traits=(Trait.SHARD_EXCHANGE, Trait.LINEAR),
    axes=".*->*",
)
"""(x; shards): a reduce-scatter of shards. x is (shards, ...). Shard i receives the sum of all shards' items i."""


@checked_options
def gather_shards(x: ArrayLike, shards: int) -> Value:
    """``x`` of every shard of a batch, (shards, *x.shape), in the order of the shards: an all-gather.

    In a training step a rank may have several shards (`training.sharding`). Elsewhere each rank must have one.

    Raises:
        AdtrainError: outside of a training step, the number of ranks is not `shards`.
    """
    return bind(gather_shards_p, as_value(x), shards=shards)


def _barrier_axes(*xs: Any) -> Axes:
    """Each output is an argument, and related to no other one."""
    names = iter(letters(sum(x.ndim for x in xs)))
    labels = tuple(tuple(next(names) for _ in x.shape) for x in xs)
    return Axes(labels, labels)


fusion_barrier_p: Primitive = Primitive(
    "fusion_barrier",
    lambda *xs: tuple(ArrayType(x.shape, x.dtype) for x in xs) if len(xs) > 1 else ArrayType(xs[0].shape, xs[0].dtype),
    lambda *xs: xs if len(xs) > 1 else xs[0],
    flops=no_flops,
    view=True,
    traits=(Trait.BARRIER,),
    axes=_barrier_axes,
)


def fusion_barrier(*values: Value) -> tuple[Value, ...]:
    """The values. Passes do not merge equations before it with equations after it; see `passes.order`.

    So the bits of a value do not depend on what else a Program computes. It has no derivative.
    """
    found = bind(fusion_barrier_p, *values)
    return (found,) if isinstance(found, Value) else found
