"""The training step on a batch of several shards, by one or more ranks.

The Program of a step: the gradient of each of this rank's shards, and their sum; an exchange that gives each rank a
slice of all ranks' sums; their sum, and the optimizer's update of the slice; an exchange that gives each rank all
slices of the new parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from adtrain import nn, ops, optim
from adtrain.augment import Augmentation, Batch
from adtrain.core import tree
from adtrain.core.array import Array, Value, array
from adtrain.core.autodiff import value_and_grad
from adtrain.core.scope import phase, scope
from adtrain.ops.collectives import fusion_barrier, pairwise_sum, tree_sum
from adtrain.training.network import Network
from adtrain.training.sharding import Bucket, Buckets
from adtrain.training.step import StepMetrics, TrainState, augment_batch, gather_batch, random_state

SHARD_BIT = 16
"""The number of a shard is in the upper 16 bits of the step's high word, which are 0 for the first 2^48 steps."""


class ShardSeeds(NamedTuple):
    """The seed of each shard and the number of the rank, as inputs, so that all ranks have the same Program.

    Attributes:
        words: uint32 (shards of this rank, 3): the seed's low word and high word, and the number of the shard.
        rank: int64 (1,).
    """

    words: Value
    rank: Value


ShardedStep: TypeAlias = Callable[[TrainState, ShardSeeds, Value, Value, Value, int], tuple[TrainState, StepMetrics]]
"""(state, seeds, images, labels, this rank's indices int64 (n,), examples in the whole batch) to the new state and the
metrics of the whole batch. If the optimizer is elementwise, its averages in the state are slices: see `Buckets`."""


def shard_seeds(seed: Array, buckets: Buckets) -> ShardSeeds:
    """The seeds of this rank's shards, from a seed uint32 (2,)."""
    sharding = buckets.sharding
    words = np.array([[*seed.numpy(), shard] for shard in sharding.local], np.uint32)
    return ShardSeeds(array(words, device=seed.device), array(np.array([sharding.rank]), device=seed.device))


@dataclass(frozen=True)
class _Step:
    network: Network
    optimizer: optim.Optimizer
    schedule: optim.Schedule
    clip_norm: float | None
    clip_value: float | None
    augmentations: Sequence[Augmentation]
    buckets: Buckets

    def __call__(
        self, state: TrainState, seeds: ShardSeeds, images: Value, labels: Value, indices: Value, total: int
    ) -> tuple[TrainState, StepMetrics]:
        sizes = self.buckets.sharding.sizes(total)
        parts, start = [], 0
        with scope("input"):
            for k, size in enumerate(sizes):
                rows = ops.slice(indices, [start], [start + size]) if size else indices
                parts.append((rows, ops.reshape(ops.slice(seeds.words, [k, 0], [k + 1, 3]), (3,))))
                start += size
            inputs = fusion_barrier(state.step, *(x for part in parts for x in part))
        shards = []
        for k, size in enumerate(sizes):
            rows, seed = inputs[1 + 2 * k : 3 + 2 * k]
            shards.append(self._shard(state, inputs[0], seed, images, labels, rows, size / total))
        with phase("backward"), scope("exchange"):
            own = [pairwise_sum(gradients) for gradients in zip(*(x[:-1] for x in shards), strict=True)]
            slices = [self._sum_of_ranks(x) for x in own]
            sums = tree_sum(ops.reshape(ops.all_gather(ops.stack([x[-1] for x in shards])), (-1, *shards[0][-1].shape)))
        with phase("update"), scope("optimizer"):
            lr = self.schedule(state.step) * self.optimizer.lr
            params, optimizer = self._update(state, self._clipped(slices), lr, seeds.rank)
        with scope("metrics"):
            loss, task_sums, statistics = self._metrics(state, sums)
        return TrainState(params, statistics, optimizer), StepMetrics(loss, task_sums, lr)

    def _shard(
        self, state: TrainState, step: Value, seed: Value, images: Value, labels: Value, rows: Value, weight: float
    ) -> tuple[Value, ...]:
        """The gradient of a shard's part of the mean loss, by bucket; then its loss, sums and statistics in float64.

        `weight` is the shard's fraction of the batch; an empty shard gives zeros.
        """
        device = state.step.device
        if not weight:
            count = 1 + self._sum_count + sum(x.size for x in tree.leaves(state.statistics))
            lengths = [(bucket.length, bucket.dtype) for bucket in self.buckets.buckets] + [
                (count, np.dtype(np.float64))
            ]
            return fusion_barrier(*(ops.zeros((n,), dtype, device) for n, dtype in lengths))
        rng = shard_state(seed, step)
        mode = nn.Mode(training=True, rng=rng)
        batch = Batch(*gather_batch(images, labels, rows), self.network.unit)
        if self.augmentations:
            batch = augment_batch(batch, self.augmentations, rng, self.network.dtype)

        def loss_of(params: nn.Params) -> tuple[Value, tuple[Value, nn.State]]:
            outputs, statistics = self.network.outputs(params, state.statistics, batch.images, mode)
            return self.network.loss_of(outputs, batch.labels, batch.mixed) * weight, (outputs, statistics)

        (loss, (outputs, statistics)), grads = value_and_grad(loss_of, has_aux=True)(state.params)
        with scope("metrics"):
            numbers = [loss, self.network.task.sums(outputs, batch.labels)]
            columns = [ops.reshape(ops.astype(x, np.float64), (-1,)) for x in numbers]
            columns += [ops.reshape(ops.astype(x, np.float64), (-1,)) * weight for x in tree.leaves(statistics)]
        with phase("backward"), scope("exchange"):
            return fusion_barrier(*self._vectors(grads, device), ops.concatenate(columns))

    @property
    def _sum_count(self) -> int:
        return int(self.network.task.zero().size)

    def _vectors(self, params: Any, device: str) -> list[Value]:
        """The vector of each bucket of a tree like the parameters."""
        leaves, found = tree.leaves(params), []
        for bucket in self.buckets.buckets:
            parts = [ops.reshape(leaves[i], (-1,)) for i in bucket.leaves]
            if bucket.padding:
                parts.append(ops.zeros((bucket.padding,), bucket.dtype, device))
            found.append(ops.concatenate(parts) if len(parts) > 1 else parts[0])
        return found

    def _sum_of_ranks(self, vector: Value) -> Value:
        """This rank's slice of the sum of all ranks' vectors."""
        return tree_sum(ops.all_to_all(ops.reshape(vector, (self.buckets.sharding.ranks, -1))))

    def _clipped(self, slices: Sequence[Value]) -> Sequence[Value]:
        if self.clip_value is not None:
            slices = optim.clip_by_value(list(slices), self.clip_value)
        if self.clip_norm is None:
            return slices
        # Each block of a slice is squared and summed alone: as many blocks as shards, whatever the number of ranks.
        slices = fusion_barrier(*slices)
        per_rank = self.buckets.sharding.per_rank
        blocks = []
        for k in range(per_rank):
            rows = [ops.reshape(x, (per_rank, -1)) for x in slices]
            parts = fusion_barrier(*(ops.reshape(ops.slice(x, [k, 0], [k + 1, x.shape[1]]), (-1,)) for x in rows))
            blocks.append(fusion_barrier(ops.stack([ops.sum(ops.square(x)) for x in parts]))[0])
        by_shard = ops.reshape(ops.all_gather(ops.stack(blocks)), (-1, len(slices)))
        return optim.clip_by_norm(slices, self.clip_norm, ops.sqrt(tree_sum(tree_sum(by_shard))))[0]

    def _update(self, state: TrainState, slices: Sequence[Value], lr: Value, rank: Value) -> tuple[Any, optim.OptState]:
        """The new parameters on all ranks, and the optimizer's new state."""
        if not self.optimizer.elementwise:
            grads = self._tree([ops.all_gather(x) for x in slices])
            return self.optimizer.update(state.params, grads, state.optimizer, lr)
        own = []
        for vector in self._vectors(state.params, state.step.device):
            rows = ops.reshape(vector, (self.buckets.sharding.ranks, -1))
            own.append(ops.reshape(ops.embedding(rank, rows) if rows.shape[0] > 1 else rows, (-1,)))
        updated, optimizer = self.optimizer.update(own, list(slices), state.optimizer, lr)
        return self._tree([ops.all_gather(x) for x in updated]), optimizer

    def _tree(self, gathered: Sequence[Value]) -> Any:
        """The tree like the parameters of which these are the slices of all ranks, by bucket."""
        leaves: dict[int, Value] = {}
        for bucket, rows in zip(self.buckets.buckets, gathered, strict=True):
            leaves.update(_leaves(bucket, ops.reshape(rows, (-1,))))
        return tree.unflatten(self.buckets.structure, [leaves[i] for i in range(len(leaves))])

    def _metrics(self, state: TrainState, sums: Value) -> tuple[Value, Value, nn.State]:
        """The loss, the task's sums and the running statistics: their mean over the shards, weighted by examples."""
        zero = self.network.task.zero()
        end = 1 + self._sum_count
        loss = ops.reshape(ops.slice(sums, [0], [1]), ())
        task_sums = ops.reshape(ops.astype(ops.slice(sums, [1], [end]), zero.dtype), zero.shape)
        leaves, structure = tree.flatten(state.statistics)
        found = []
        for x in leaves:
            mean = ops.slice(sums, [end], [end + x.size])
            mean = mean if np.issubdtype(x.dtype, np.floating) else ops.round(mean)
            found.append(ops.reshape(ops.astype(mean, x.dtype), x.shape))
            end += x.size
        return loss, task_sums, tree.unflatten(structure, found)


def _leaves(bucket: Bucket, vector: Value) -> dict[int, Value]:
    found = {}
    for i, shape, (start, end) in zip(bucket.leaves, bucket.shapes, bucket.bounds, strict=True):
        found[i] = ops.reshape(ops.slice(vector, [start], [end]), shape)
    return found


def shard_state(seed: Value, step: Value) -> Value:
    """`ops.rng_state` of a shard, from a row of `ShardSeeds.words`, (3,), and the step, int64 ()."""
    with scope("random"):
        words = [ops.slice(seed, [0], [2]), ops.slice(seed, [2], [3])]
        state = random_state(words[0], step)
        place = ops.astype(words[1], np.float64) * 2.0**SHARD_BIT
        high = ops.astype(ops.slice(state, [3], [4]), np.float64) + place
        return ops.concatenate([ops.slice(state, [0], [3]), ops.astype(high, np.uint32)])


def sharded_step(
    network: Network,
    optimizer: optim.Optimizer,
    schedule: optim.Schedule,
    buckets: Buckets,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    augmentations: Sequence[Augmentation] = (),
) -> ShardedStep:
    """`train_step` on a batch that is divided into shards. Batch normalisation sees one shard at a time."""
    return _Step(network, optimizer, schedule, clip_norm, clip_value, augmentations, buckets)
