"""How a batch is divided into shards, and shards and optimizer state among ranks.

A batch has a fixed number of shards, a power of two. Gradients are computed for each shard alone and added in a fixed
binary tree. So the result has the same bits for each number of ranks that divides the number of shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from adtrain.core import communicator, tree
from adtrain.core.types import Shape

BUCKET_BYTES = 4 << 20
"""The most bytes in a bucket; a larger parameter has a bucket of its own."""
ALIGNMENT = 16
"""The length of each rank's slice of a bucket is a multiple of this number of elements, so that vectors are aligned."""


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
        length: elements of the vector, with zeros at its end.
    """

    leaves: tuple[int, ...]
    shapes: tuple[Shape, ...]
    dtype: np.dtype[Any]
    length: int

    @property
    def padding(self) -> int:
        return self.length - sum(map(prod, self.shapes))

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The start and end of each parameter in the vector."""
        ends = list(accumulate(map(prod, self.shapes)))
        return list(zip([0, *ends], ends, strict=False))


class Buckets:
    """The parameters of a network as vectors: those whose gradients are complete first come first.

    The division depends on the number of shards, but not on the number of ranks.
    """

    def __init__(self, params: Any, sharding: Sharding) -> None:
        leaves, self.structure = tree.flatten(params)
        self.sharding = sharding
        groups: list[list[int]] = []
        held = 0
        for i in reversed(range(len(leaves))):
            size = prod(leaves[i].shape) * leaves[i].dtype.itemsize
            if not groups or held + size > BUCKET_BYTES or leaves[groups[-1][0]].dtype != leaves[i].dtype:
                groups.append([])
                held = 0
            groups[-1].append(i)
            held += size
        self.buckets = [self._bucket([(i, leaves[i]) for i in group]) for group in groups]

    def _bucket(self, leaves: Sequence[tuple[int, Any]]) -> Bucket:
        unit = self.sharding.shards * ALIGNMENT
        shapes = tuple(x.shape for _, x in leaves)
        length = -(-sum(map(prod, shapes)) // unit) * unit
        return Bucket(tuple(i for i, _ in leaves), shapes, leaves[0][1].dtype, length)

    def slices(self, values: Any) -> list[np.ndarray]:
        """This rank's slice of each bucket of a tree of NumPy arrays."""
        leaves, found = tree.leaves(values), []
        for bucket in self.buckets:
            parts = [np.reshape(leaves[i], -1) for i in bucket.leaves]
            vector = np.concatenate([*parts, np.zeros(bucket.padding, bucket.dtype)])
            found.append(vector.reshape(self.sharding.ranks, -1)[self.sharding.rank].copy())
        return found

    def gathered(self, slices: Sequence[np.ndarray]) -> Any:
        """The tree of NumPy arrays of which all ranks have `slices`."""
        leaves: dict[int, np.ndarray] = {}
        for bucket, own in zip(self.buckets, slices, strict=True):
            vector = communicator.all_gathered(own).reshape(-1)
            for i, shape, (start, end) in zip(bucket.leaves, bucket.shapes, bucket.bounds, strict=True):
                leaves[i] = vector[start:end].reshape(shape)
        return tree.unflatten(self.structure, [leaves[i] for i in range(len(leaves))])

    def divided_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """An optimizer's state on the host: in place of each tree like the parameters, the slices of this rank."""
        return {name: self.slices(x) if self._like_params(x) else x for name, x in state.items()}

    def whole_state(self, state: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
        """The state that was divided; `whole` is one of the same structure before it is divided. All ranks call it."""
        return {name: self.gathered(x) if self._like_params(whole[name]) else x for name, x in state.items()}

    def _like_params(self, x: Any) -> bool:
        return bool(tree.flatten(x)[1] == self.structure)
