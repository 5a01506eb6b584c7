"""The training step on a batch of several shards, by one or more ranks.

The Program of a step: the gradient of each of this rank's shards, and their sum; an exchange that gives each rank a
slice of all ranks' sums; their sum, and the optimizer's update of the slice; an exchange that gives each rank all
slices of the new parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from adtrain import nn, ops, optim
from adtrain.augment import Augmentation, Batch
from adtrain.core import tree
from adtrain.core.array import Array, Value, array
from adtrain.core.autodiff import value_and_grad
from adtrain.core.scope import phase, scope
from adtrain.core.views import subview
from adtrain.ops.collectives import fusion_barrier, pairwise_sum, tree_sum
from adtrain.training.lockstep import in_lockstep
from adtrain.training.network import Network
from adtrain.training.sharding import Buckets
from adtrain.training.step import (
    EvaluationStep,
    StepMetrics,
    Totals,
    TrainState,
    augment_batch,
    gather_batch,
    random_state,
)

SHARD_BIT = 16
"""The number of a shard is in the upper 16 bits of the step's high word, which are 0 for the first 2^48 steps."""


ShardedStep: TypeAlias = Callable[[TrainState, Value, Value, Value, Value, int], tuple[TrainState, StepMetrics]]
"""(state, seeds, images, labels, this rank's indices int64 (n,), examples in the whole batch) to the new state and the
metrics of the whole batch. The parameters in the state are the vectors of buckets. If the optimizer is elementwise, its
averages are slices of such vectors: see `Buckets`."""


def shard_seeds(seed: Array, buckets: Buckets) -> Array:
    """uint32 (shards of this rank, 3): the low and high word of a seed uint32 (2,), and the number of the shard."""
    return array(np.array([[*seed.numpy(), shard] for shard in buckets.sharding.local], np.uint32), device=seed.device)


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
        self, state: TrainState, seeds: Value, images: Value, labels: Value, indices: Value, total: int
    ) -> tuple[TrainState, StepMetrics]:
        sizes = self.buckets.sharding.sizes(total)
        params = self.buckets.unflatten(state.params, subview)
        taken, start = [], 0
        with scope("input"):
            for k, size in enumerate(sizes):
                rows = ops.slice(indices, [start], [start + size]) if size else indices
                taken.append((rows, ops.reshape(ops.slice(seeds, [k, 0], [k + 1, 3]), (3,))))
                start += size
            step, *inputs = fusion_barrier(state.step, *(x for shard in taken for x in shard))
        total_weight = self._total_weight(labels, inputs[::2], sizes)
        given = [
            (params, state.statistics, step, total_weight, seed, images, labels, rows)
            for rows, seed in zip(inputs[::2], inputs[1::2], strict=True)
        ]
        functions = [partial(self._shard, size, total) for size in sizes]
        if self.network.synchronized:
            shards = in_lockstep(functions, given, self.buckets.sharding)
        else:
            shards = [list(f(*arguments)) for f, arguments in zip(functions, given, strict=True)]
        with phase("backward"), scope("exchange"):
            *buckets, numbers = zip(*shards, strict=True)  # each has the arrays of all shards of this rank
            own = [pairwise_sum(gradients) for gradients in buckets]
            received = [ops.all_to_all(ops.reshape(x, (self.buckets.sharding.ranks, -1))) for x in own]
            all_numbers = ops.all_gather(ops.stack(numbers))
        with phase("update"), scope("optimizer"):
            lr = self.schedule(state.step) * self.optimizer.lr
            slices = self._clipped([tree_sum(x) for x in received])
            vectors, optimizer = self._update(state, params, slices, lr)
        with scope("metrics"):  # after the update, which does not wait for them
            sums = tree_sum(ops.reshape(all_numbers, (-1, *numbers[0].shape)))
            loss, task_sums, statistics = self._metrics(state, sums)
        return TrainState(vectors, statistics, optimizer), StepMetrics(loss, task_sums, lr)

    def _total_weight(self, labels: Value, shards: Sequence[Value], sizes: Sequence[int]) -> Value | None:
        """The sum of the class weights of the whole batch, over all ranks; None for a loss without class weights.

        `shards` are the indices of this rank's shards, `sizes` their numbers of examples.
        """
        if self.network.class_weights is None:
            return None
        with scope("exchange"):
            found = [fusion_barrier(self.network.weight_of(ops.embedding(rows, labels)))[0] for rows in shards]
            own = [weight if size else ops.zeros_like(weight) for weight, size in zip(found, sizes, strict=True)]
            return tree_sum(ops.reshape(ops.all_gather(ops.stack(own)), (-1,)))

    def _shard(
        self,
        size: int,
        total: int,
        params: nn.Params,
        statistics: nn.State,
        step: Value,
        total_weight: Value | None,
        seed: Value,
        images: Value,
        labels: Value,
        rows: Value,
    ) -> Sequence[Value]:
        """The vectors of the gradient of a shard's part of the mean loss; then its loss, sums and statistics, float64.

        `size` is the number of the shard's examples, `total` that of the batch. An empty shard returns zeros. If layers
        are synchronized, it takes part in their exchanges with an image of zeros.
        """
        device, weight = step.device, size / total
        if not size and not self.network.synchronized:
            count = 1 + self._sum_count + sum(x.size for x in tree.leaves(statistics))
            lengths = [(bucket.length, bucket.dtype) for bucket in self.buckets.buckets] + [
                (count, np.dtype(np.float64))
            ]
            return fusion_barrier(*(ops.zeros((n,), dtype, device) for n, dtype in lengths))
        rng = shard_state(seed, step)
        mode = nn.Mode(training=True, rng=rng, shards=self.buckets.sharding.all_sizes(total))
        found = gather_batch(images, labels, rows) if size else _zeros_for(images, labels)
        batch = Batch(*found, self.network.unit)
        if self.augmentations:
            batch = augment_batch(batch, self.augmentations, rng, self.network.dtype)

        part = weight if total_weight is None else float(size > 0)  # with class weights the mean is the batch's

        def loss_of(params: nn.Params) -> tuple[Value, tuple[Value, nn.State]]:
            outputs, moved = self.network.outputs(params, statistics, batch.images, mode)
            return self.network.loss_of(outputs, batch.labels, batch.mixed, total_weight) * part, (outputs, moved)

        (loss, (outputs, moved)), grads = value_and_grad(loss_of, has_aux=True)(params)
        with scope("metrics"):
            sums = self.network.task.sums(outputs, batch.labels)
            numbers = [loss, sums if size else ops.zeros_like(sums)]
            columns = [ops.reshape(ops.astype(x, np.float64), (-1,)) for x in numbers]
            columns += [ops.reshape(ops.astype(x, np.float64), (-1,)) * weight for x in tree.leaves(moved)]
        with phase("backward"), scope("exchange"):
            return fusion_barrier(*self._vectors(grads, device), ops.concatenate(columns))

    @property
    def _sum_count(self) -> int:
        return int(self.network.task.zero().size)

    def _vectors(self, params: Any, device: str) -> list[Value]:
        """The vector of each bucket of a tree like the parameters."""
        leaves, found = tree.leaves(params), []
        for bucket in self.buckets.buckets:
            parts = []
            for i, gap in zip(bucket.leaves, bucket.gaps, strict=True):
                parts += [ops.reshape(leaves[i], (-1,)), *([ops.zeros((gap,), bucket.dtype, device)] if gap else [])]
            found.append(ops.concatenate(parts) if len(parts) > 1 else parts[0])
        return found

    def _own_slice(self, vector: Value) -> Value:
        sharding = self.buckets.sharding
        length = vector.size // sharding.ranks
        return vector if sharding.ranks == 1 else subview(vector, sharding.rank * length, (length,))

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

    def _update(
        self, state: TrainState, params: nn.Params, slices: Sequence[Value], lr: Value
    ) -> tuple[Any, optim.OptState]:
        """The vectors of the new parameters on all ranks, and the optimizer's new state."""
        if not self.optimizer.elementwise:
            grads = self.buckets.unflatten([_all_gathered(x) for x in slices], subview)
            params, optimizer = self.optimizer.update(params, grads, state.optimizer, lr)
            return self._vectors(params, state.step.device), optimizer
        own = [self._own_slice(x) for x in tree.leaves(state.params)]
        updated, optimizer = self.optimizer.update(own, list(slices), state.optimizer, lr)
        return [_all_gathered(x) for x in updated], optimizer

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


def evaluation_of_vectors(step: EvaluationStep, buckets: Buckets) -> EvaluationStep:
    """`step` with the vectors of the parameters in place of their tree as the second argument."""

    def evaluate(totals: Totals, vectors: Any, *others: Any) -> Totals:
        return step(totals, buckets.unflatten(vectors, subview), *others)

    return evaluate


def _all_gathered(own: Value) -> Value:
    """The vector of all ranks' slices, in the order of the ranks."""
    return ops.reshape(ops.all_gather(own), (-1,))


def _zeros_for(images: Value, labels: Value) -> tuple[Value, Value]:
    """A batch of one image of zeros with the label 0."""
    return ops.zeros((1, *images.shape[1:]), images.dtype, images.device), ops.zeros(
        (1, *labels.shape[1:]), labels.dtype, labels.device
    )


def shard_state(seed: Value, step: Value) -> Value:
    """`ops.rng_state` of a shard, from a row (3,) of `shard_seeds` and the step, int64 ()."""
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
    """`train_step` on a batch that is divided into shards. Batch norm without `sync` sees one shard at a time."""
    return _Step(network, optimizer, schedule, clip_norm, clip_value, augmentations, buckets)
