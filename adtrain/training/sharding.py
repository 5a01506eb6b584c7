"""How a batch is divided into shards, and shards and optimizer state among ranks.

A batch has a fixed number of shards, a power of two. Gradients are computed for each shard alone and added in a fixed
binary tree. So the result has the same bits for each number of ranks that divides the number of shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from adtrain.core import communicator, tree
from adtrain.core.array import Value
from adtrain.core.types import Shape
from adtrain.core.views import subview

BUCKET_BYTES = 4 << 20
"""A bucket is full when its parameters have at least this number of bytes."""
ALIGNMENT = 64
"""Bytes. Each parameter, and each rank's slice of a bucket, begins at a multiple of it."""


@dataclass(frozen=True)
class Sharding:
    """The shards of a batch, and those that this rank computes: `per_rank` consecutive ones.

    Attributes:
        shards: a power of two, of which `ranks` is a divisor.
        rank: the number of this rank.
    """

    shards: int
    ranks: int
    rank: int

    @property
    def per_rank(self) -> int:
        return self.shards // self.ranks

    @property
    def local(self) -> range:
        """The numbers of this rank's shards."""
        return range(self.rank * self.per_rank, (self.rank + 1) * self.per_rank)

    def sizes(self, total: int) -> list[int]:
        """The number of examples of each of this rank's shards in a batch of `total`.

        Sizes differ by at most 1; shards of a short batch can be empty.
        """
        return [_size(total, self.shards, shard) for shard in self.local]

    def all_sizes(self, total: int) -> tuple[int, ...]:
        """The number of examples of each shard of all ranks in a batch of `total`."""
        return tuple(_size(total, self.shards, shard) for shard in range(self.shards))

    def part(self, batch: np.ndarray) -> np.ndarray:
        """This rank's indices in a batch of indices. If it has none, one index, which its empty shards do not use."""
        start = sum(_size(len(batch), self.shards, shard) for shard in range(self.local.start))
        return batch[start : start + sum(self.sizes(len(batch)))] if any(self.sizes(len(batch))) else batch[:1]


def _size(total: int, shards: int, shard: int) -> int:
    return total // shards + (shard < total % shards)


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are exchanged together, as one vector.

    Attributes:
        leaves: the positions of the parameters in their tree.
        shapes: of the parameters.
        dtype: of the parameters.
        length: elements of the vector. Zeros fill the gaps between parameters.
    """

    leaves: tuple[int, ...]
    shapes: tuple[Shape, ...]
    dtype: np.dtype[Any]
    length: int

    @property
    def sizes(self) -> list[int]:
        """The number of elements of each parameter."""
        return list(map(prod, self.shapes))

    @property
    def starts(self) -> list[int]:
        """The index in the vector of each parameter's first element."""
        return [0, *accumulate(_aligned(size, self.dtype) for size in self.sizes)][:-1]

    @property
    def gaps(self) -> list[int]:
        """The number of zeros after each parameter, up to the next one or the end of the vector."""
        return [
            following - start - size
            for start, size, following in zip(self.starts, self.sizes, [*self.starts[1:], self.length], strict=True)
        ]


def _aligned(size: int, dtype: np.dtype[Any], count: int = 1) -> int:
    """`size` rounded up to elements whose `count` equal parts are multiples of ALIGNMENT bytes."""
    unit = count * ALIGNMENT // dtype.itemsize
    return -(-size // unit) * unit


class Buckets:
    """The parameters of a network as vectors: those whose gradients are complete first come first.

    The division depends on the number of shards, but not on the number of ranks.
    """

    def __init__(self, params: Any, sharding: Sharding) -> None:
        leaves, self.structure = tree.flatten(params)
        self.shapes = [x.shape for x in leaves]
        self.sharding = sharding
        groups: list[list[int]] = []
        held = 0
        for i in reversed(range(len(leaves))):
            if not groups or held >= BUCKET_BYTES or leaves[groups[-1][0]].dtype != leaves[i].dtype:
                groups.append([])
                held = 0
            groups[-1].append(i)
            held += prod(leaves[i].shape) * leaves[i].dtype.itemsize
        self.buckets = [self._bucket([(i, leaves[i]) for i in group]) for group in groups]

    def _bucket(self, leaves: Sequence[tuple[int, Any]]) -> Bucket:
        shapes = tuple(x.shape for _, x in leaves)
        dtype = leaves[0][1].dtype
        length = _aligned(sum(_aligned(prod(shape), dtype) for shape in shapes), dtype, self.sharding.shards)
        return Bucket(tuple(i for i, _ in leaves), shapes, dtype, length)

    def flatten(self, values: Any) -> Any:
        """The vector of each bucket of a tree of NumPy arrays, as a list.

        An optimizer's averages may have another dtype than the parameters.
        """
        leaves = tree.leaves(values)
        vectors = [np.zeros(x.length, np.result_type(*(leaves[i].dtype for i in x.leaves))) for x in self.buckets]
        for vector, bucket in zip(vectors, self.buckets, strict=True):
            for i, start, size in zip(bucket.leaves, bucket.starts, bucket.sizes, strict=True):
                vector[start : start + size] = np.reshape(leaves[i], -1)
        return vectors

    def unflatten(self, vectors: Any, subview: Callable[[Any, int, Shape], Any]) -> Any:
        """The tree of the vectors; the reverse of `flatten`.

        `subview(vector, start, shape)` returns the elements of a vector from index `start` on, as an array of `shape`.
        """
        leaves = {
            i: subview(vector, start, shape)
            for vector, bucket in zip(vectors, self.buckets, strict=True)
            for i, start, shape in zip(bucket.leaves, bucket.starts, bucket.shapes, strict=True)
        }
        return tree.unflatten(self.structure, [leaves[i] for i in range(len(leaves))])

    def unflatten_numpy(self, vectors: Any) -> Any:
        """`unflatten` of NumPy arrays. The results are views of the vectors."""
        return self.unflatten(vectors, lambda x, start, shape: x[start : start + prod(shape)].reshape(shape))

    def slices(self, values: Any) -> list[np.ndarray]:
        """This rank's slice of each bucket of a tree of NumPy arrays."""
        ranks, rank = self.sharding.ranks, self.sharding.rank
        return [vector.reshape(ranks, -1)[rank].copy() for vector in self.flatten(values)]

    def divided_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """An optimizer's state on the host: in place of each tree like the parameters, the slices of this rank."""
        return {name: self.slices(x) if self._like_params(x) else x for name, x in state.items()}

    def whole_state(self, state: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
        """The state that was divided; `whole` is one of the same structure before it is divided. All ranks call it."""

        def gathered(slices: Sequence[np.ndarray]) -> Any:
            return self.unflatten_numpy([communicator.all_gathered(x).reshape(-1) for x in slices])

        return {name: gathered(x) if self._like_params(whole[name]) else x for name, x in state.items()}

    def without_padding(self, state: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
        """The divided state on a device, of its slices only the elements of parameters. See `whole_state`."""

        def without(slices: Sequence[Value]) -> Any:
            return [part for x, bucket in zip(slices, self.buckets, strict=True) for part in self._parts(x, bucket)]

        return {name: without(x) if self._like_params(whole[name]) else x for name, x in state.items()}

    def _parts(self, own: Value, bucket: Bucket) -> list[Value]:
        """The elements of each parameter in this rank's slice of a bucket's vector."""
        first, found = self.sharding.rank * own.size, []
        for start, size in zip(bucket.starts, bucket.sizes, strict=True):
            begin, end = max(start - first, 0), min(start + size - first, own.size)
            if begin < end:
                found.append(subview(own, begin, (end - begin,)))
        return found

    def _like_params(self, x: Any) -> bool:
        return bool(tree.flatten(x)[1] == self.structure)
