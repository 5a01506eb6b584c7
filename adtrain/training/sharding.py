"""Batches in shards: how shards and optimizer state are divided among ranks, and the training step on them.

A batch has a fixed number of shards, a power of two. Gradients are computed for each shard alone and added in a fixed
binary tree. So the result has the same bits for each number of ranks that divides the number of shards.

The Program of a step: the gradient of each of this rank's shards, and their sum; an exchange that gives each rank a
slice of all ranks' sums; their sum, and the optimizer's update of the slice; an exchange that gives each rank all
slices of the new parameters. Shards of one rank that exchange values, such as the statistics of synchronized batch
norm, are computed in lockstep: one after the other up to an exchange, then the exchange, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np

from adtrain import nn, ops, optim
from adtrain.core import communicator, tree
from adtrain.core.array import Array, Value, array
from adtrain.core.autodiff import value_and_grad
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import stage
from adtrain.core.trace import at, bind, phase, scope
from adtrain.core.types import Shape
from adtrain.core.views import subview
from adtrain.ops.collectives import fusion_barrier, gather_shards_p, pairwise_sum, tree_sum
from adtrain.training.step import EvaluationStep, StepMetrics, StepParts, Totals, TrainState, random_state

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
        return list(self.all_sizes(total)[self.local.start : self.local.stop])

    def all_sizes(self, total: int) -> tuple[int, ...]:
        """The number of examples of each shard of all ranks in a batch of `total`."""
        return tuple(total // self.shards + (shard < total % self.shards) for shard in range(self.shards))

    def part(self, batch: np.ndarray) -> np.ndarray:
        """This rank's indices in a batch of indices. If it has none, one index, which its empty shards do not use."""
        start = sum(self.all_sizes(len(batch))[: self.local.start])
        count = sum(self.sizes(len(batch)))
        return batch[start : start + count] if count else batch[:1]


class Place(NamedTuple):
    """Where the vector of a bucket has a parameter: `size` elements from index `start` on, then `gap` zeros."""

    path: str  # of the parameter in its tree
    shape: Shape
    start: int
    size: int
    gap: int


@dataclass(frozen=True)
class Bucket:
    """Parameters of one dtype whose gradients are exchanged together, as one vector of `length` elements."""

    places: tuple[Place, ...]
    dtype: np.dtype[Any]
    length: int

    @classmethod
    def of(cls, leaves: Mapping[str, Any], shards: int) -> Bucket:
        """The bucket of parameters by their paths, for vectors that `shards` shards divide."""
        dtype = next(iter(leaves.values())).dtype
        sizes = [prod(x.shape) for x in leaves.values()]
        starts = [0, *accumulate(_aligned(size, dtype) for size in sizes)]
        length = _aligned(starts.pop(), dtype, shards)
        ends = [*starts[1:], length]
        places = [
            Place(path, x.shape, start, size, end - start - size)
            for (path, x), start, size, end in zip(leaves.items(), starts, sizes, ends, strict=True)
        ]
        return cls(tuple(places), dtype, length)

    @property
    def name(self) -> str:
        """The path of the first parameter."""
        return self.places[0].path


def _aligned(size: int, dtype: np.dtype[Any], count: int = 1) -> int:
    """`size` rounded up to elements whose `count` equal parts are multiples of ALIGNMENT bytes."""
    unit = count * ALIGNMENT // dtype.itemsize
    return -(-size // unit) * unit


class Buckets:
    """The parameters of a network as vectors: those whose gradients are complete first come first.

    The parameters of a bucket have the same label (`optim.Optimizer.label`), so the optimizer updates a vector as it
    does each of its parameters. The division depends on the number of shards, but not on the number of ranks.

    Attributes:
        trained: the buckets whose parameters are trained.
    """

    def __init__(self, params: Any, sharding: Sharding, optimizer: optim.Optimizer) -> None:
        self.structure, self.paths = tree.flatten(params)[1], tree.paths(params)
        self.sharding = sharding
        leaves = dict(zip(self.paths, tree.leaves(params), strict=True))
        groups: list[list[str]] = []
        filling: dict[Any, tuple[list[str], int]] = {}
        for path, x in reversed(leaves.items()):
            kind = optimizer.label(path), x.dtype
            group, held = filling.get(kind, ([], 0))
            if not group or held >= BUCKET_BYTES:
                group, held = [], 0
                groups.append(group)
            group.append(path)
            filling[kind] = group, held + prod(x.shape) * x.dtype.itemsize
        self.buckets = [Bucket.of({path: leaves[path] for path in group}, sharding.shards) for group in groups]
        self.trained = [bucket for bucket in self.buckets if optimizer.trains(bucket.name)]
        self._elementwise = optimizer.elementwise
        self._trained_paths = list(filter(optimizer.trains, self.paths))

    def flatten(self, values: Any) -> Any:
        """The vector of each bucket of a tree of NumPy arrays, like the parameters or like those that are trained.

        An optimizer's averages may have another dtype than the parameters.
        """
        leaves = dict(zip(tree.paths(values), tree.leaves(values), strict=True))
        vectors = []
        for bucket in self.buckets:
            if bucket.name in leaves:
                dtype = np.result_type(*(leaves[place.path].dtype for place in bucket.places))
                vectors.append(np.zeros(bucket.length, dtype))
                for place in bucket.places:
                    vectors[-1][place.start : place.start + place.size] = np.reshape(leaves[place.path], -1)
        return vectors

    def unflatten(self, vectors: Any, subview: Callable[[Any, int, Shape], Any]) -> Any:
        """The tree of the vectors of all buckets; the reverse of `flatten`.

        `subview(vector, start, shape)` returns the elements of a vector from index `start` on, as an array of `shape`.
        """
        leaves = _leaves(self.buckets, vectors, subview)
        return tree.unflatten(self.structure, [leaves[path] for path in self.paths])

    def unflatten_numpy(self, vectors: Any) -> Any:
        """`unflatten` of NumPy arrays. The results are views of the vectors."""
        return self.unflatten(vectors, _numpy_subview)

    def slices(self, values: Any) -> dict[str, np.ndarray]:
        """This rank's slice of each bucket of a tree of NumPy arrays like the trained parameters, by bucket name."""
        ranks, rank = self.sharding.ranks, self.sharding.rank
        vectors = zip(self.trained, self.flatten(values), strict=True)
        return {bucket.name: vector.reshape(ranks, -1)[rank].copy() for bucket, vector in vectors}

    def divided_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """An optimizer's state on the host: in place of each tree like the parameters, the slices of this rank.

        The state of an optimizer that is not elementwise stays whole, here and in the next methods.
        """
        return {name: self.slices(x) if self._like_params(x) else x for name, x in state.items()}

    def whole_state(self, state: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
        """The state that was divided; `whole` is one of the same structure before it is divided. All ranks call it."""

        def gathered(slices: Mapping[str, np.ndarray], like: Any) -> Any:
            vectors = [communicator.all_gathered(x).reshape(-1) for x in slices.values()]
            leaves = _leaves(self.trained, vectors, _numpy_subview)
            return tree.unflatten(tree.flatten(like)[1], [leaves[path] for path in self._trained_paths])

        return {name: gathered(x, whole[name]) if self._like_params(whole[name]) else x for name, x in state.items()}

    def without_padding(self, state: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
        """The divided state on a device, of its slices only the elements of parameters. See `whole_state`."""

        def without(slices: Mapping[str, Value]) -> Any:
            found = zip(slices.values(), self.trained, strict=True)
            return [part for x, bucket in found for part in self._parts(x, bucket)]

        return {name: without(x) if self._like_params(whole[name]) else x for name, x in state.items()}

    def _parts(self, own: Value, bucket: Bucket) -> list[Value]:
        """The elements of each parameter in this rank's slice of a bucket's vector."""
        first, found = self.sharding.rank * own.size, []
        for place in bucket.places:
            begin, end = max(place.start - first, 0), min(place.start + place.size - first, own.size)
            if begin < end:
                found.append(subview(own, begin, (end - begin,)))
        return found

    def _like_params(self, x: Any) -> bool:
        return self._elementwise and tree.paths(x) == self._trained_paths


def _leaves(buckets: Sequence[Bucket], vectors: Any, subview: Callable[[Any, int, Shape], Any]) -> dict[str, Any]:
    """The parameters in the vectors of these buckets, by path."""
    return {
        place.path: subview(vector, place.start, place.shape)
        for vector, bucket in zip(vectors, buckets, strict=True)
        for place in bucket.places
    }


def _numpy_subview(vector: np.ndarray, start: int, shape: Shape) -> np.ndarray:
    return vector[start : start + prod(shape)].reshape(shape)


class _Exchange(NamedTuple):
    """The exchange that a shard waits for, and the value that it sends."""

    equation: Equation
    sent: Value


def in_lockstep(
    functions: Sequence[Callable[..., Sequence[Value]]], arguments: Sequence[Sequence[Any]], sharding: Sharding
) -> list[list[Value]]:
    """Call ``functions[i](*arguments[i])`` for each shard i of this rank; returns the results of each.

    The functions may call `ops.gather_shards`, all in the same order. Between two exchanges, fusion barriers separate
    the shards. So the bits of a shard's results do not depend on the other shards of this rank.
    """
    running = [
        _run(stage(f).trace(*args)[0], tree.leaves(tuple(args))) for f, args in zip(functions, arguments, strict=True)
    ]
    received: list[Any] = [None] * len(running)
    while True:
        waiting, results = list[_Exchange](), list[list[Value]]()
        for shard, value in zip(running, received, strict=True):
            try:
                waiting.append(shard.send(value))
            except StopIteration as end:
                results.append(end.value)
        if results:
            return results
        received = _exchange(waiting, sharding)


def _run(program: Program, arguments: Sequence[Value]) -> Generator[_Exchange, Value, list[Value]]:
    """Run the equations of a shard. Yields each exchange, is sent the received value, and returns the results."""
    values: dict[Variable, Value] = {**program.constants, **dict(zip(program.inputs, arguments, strict=True))}
    for e in program.equations:
        args = [values[v] for v in e.inputs]
        if e.has(Trait.SHARD_EXCHANGE):
            result: Any = yield _Exchange(e, fusion_barrier(*args)[0])
        else:
            with at(e.scope, e.phase):
                result = bind(e.primitive, *args, **e.params)
        values.update(zip(e.outputs, (result,) if isinstance(result, Value) else result, strict=True))
    return [values[v] for v in program.outputs]


def _exchange(waiting: Sequence[_Exchange], sharding: Sharding) -> list[Value]:
    """The value that each of this rank's shards receives."""
    first, sent = waiting[0].equation, [exchange.sent for exchange in waiting]
    with at(first.scope, first.phase):
        if first.primitive is gather_shards_p:
            gathered = ops.reshape(ops.all_gather(ops.stack(sent)), (sharding.shards, *sent[0].shape))
            return list(fusion_barrier(gathered)) * len(sent)
        shape = sent[0].shape[1:]
        by_rank = ops.reshape(pairwise_sum(sent), (sharding.ranks, sharding.per_rank, *shape))
        own = tree_sum(ops.all_to_all(by_rank))
        rows = [ops.slice(own, [k, *[0] * len(shape)], [k + 1, *shape]) for k in range(len(sent))]
        return list(fusion_barrier(*(ops.reshape(row, shape) for row in rows)))


SHARD_BIT = 16
"""The number of a shard is in the upper 16 bits of the step's high word, which are 0 for the first 2^48 steps."""


def shard_seeds(seed: Array, buckets: Buckets) -> Array:
    """uint32 (shards of this rank, 3): the low and high word of a seed uint32 (2,), and the number of the shard."""
    return array(np.array([[*seed.numpy(), shard] for shard in buckets.sharding.local], np.uint32), device=seed.device)


class ShardedStep:
    """`train_step` on a batch that is divided into shards. Batch norm without `sync` sees one shard at a time.

    The parameters in the state are the vectors of buckets. If the optimizer is elementwise, its averages are slices of
    such vectors, by the names of the buckets: see `Buckets`.
    """

    def __init__(self, parts: StepParts, buckets: Buckets) -> None:
        self.parts, self.buckets = parts, buckets
        self.network, self.optimizer = parts.network, parts.optimizer

    def __call__(
        self, state: TrainState, seeds: Value, images: Value, labels: Value, indices: Value, total: int
    ) -> tuple[TrainState, StepMetrics]:
        """The new state and the metrics of the whole batch, which has `total` examples on all ranks.

        `seeds` are those of `shard_seeds`, `indices` this rank's, int64 (n,).
        """
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
            lr = self.parts.learning_rate(state)
            slices = self._clipped([tree_sum(x) for x in received])
            with ops.matmul_precision(self.network.products):
                vectors, optimizer = self._update(state, params, slices, lr)
        with scope("metrics"):  # after the update, which does not wait for them
            sums = tree_sum(ops.reshape(all_numbers, (-1, *numbers[0].shape)))
            loss, task_sums, statistics = self._metrics(state, sums)
        new = TrainState(vectors, statistics, optimizer)
        return self.parts.completed(new, state, loss, total), StepMetrics(loss, task_sums, lr)

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
            lengths = [(bucket.length, bucket.dtype) for bucket in self.buckets.trained] + [
                (count, np.dtype(np.float64))
            ]
            return fusion_barrier(*(ops.zeros((n,), dtype, device) for n, dtype in lengths))
        rng = shard_state(seed, step)
        mode = nn.Mode(training=True, rng=rng, shards=self.buckets.sharding.all_sizes(total))
        batch = self.parts.batch(images, labels, rows, step, rng, is_empty=not size)
        part = weight if total_weight is None else float(size > 0)  # with class weights the mean is the batch's

        def loss_of(trained: nn.Params) -> tuple[Value, tuple[Value, nn.State]]:
            merged = self.optimizer.merged(params, trained)
            found, aux = self.network.training_loss(merged, statistics, batch, mode, total_weight)
            return found * part, aux

        (loss, (outputs, moved)), grads = value_and_grad(loss_of, has_aux=True)(self.optimizer.trained(params))
        with scope("metrics"):
            sums = self.network.training_sums(outputs, batch.labels)
            numbers = [loss, sums if size else ops.zeros_like(sums)]
            columns = [ops.reshape(ops.astype(x, np.float64), (-1,)) for x in numbers]
            columns += [ops.reshape(ops.astype(x, np.float64), (-1,)) * weight for x in tree.leaves(moved)]
        with phase("backward"), scope("exchange"):
            return fusion_barrier(*self._vectors(grads, device), ops.concatenate(columns))

    @property
    def _sum_count(self) -> int:
        return int(self.network.task.zero().size)

    def _vectors(self, values: Any, device: str) -> list[Value]:
        """The vector of each trained bucket of a tree like the parameters that are trained."""
        leaves, found = dict(zip(tree.paths(values), tree.leaves(values), strict=True)), []
        for bucket in self.buckets.trained:
            parts = []
            for place in bucket.places:
                parts.append(ops.reshape(leaves[place.path], (-1,)))
                parts += [ops.zeros((place.gap,), bucket.dtype, device)] if place.gap else []
            found.append(ops.concatenate(parts) if len(parts) > 1 else parts[0])
        return found

    def _own_slice(self, vector: Value) -> Value:
        sharding = self.buckets.sharding
        length = vector.size // sharding.ranks
        return vector if sharding.ranks == 1 else subview(vector, sharding.rank * length, (length,))

    def _clipped(self, slices: Sequence[Value]) -> Sequence[Value]:
        if self.parts.clip_value is not None:
            slices = optim.clip_by_value(list(slices), self.parts.clip_value)
        if self.parts.clip_norm is None:
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
        return optim.clip_by_norm(slices, self.parts.clip_norm, ops.sqrt(tree_sum(tree_sum(by_shard))))[0]

    def _update(
        self, state: TrainState, params: nn.Params, slices: Sequence[Value], lr: Value
    ) -> tuple[Any, optim.OptState]:
        """The vectors of the new parameters on all ranks, and the optimizer's new state."""
        vectors = dict(zip((bucket.name for bucket in self.buckets.buckets), tree.leaves(state.params), strict=True))
        names = [bucket.name for bucket in self.buckets.trained]
        if not self.optimizer.elementwise:
            gathered = {name: _all_gathered(x) for name, x in zip(names, slices, strict=True)}
            grads = self.optimizer.trained(self.buckets.unflatten(list({**vectors, **gathered}.values()), subview))
            trained, optimizer = self.optimizer.update(self.optimizer.trained(params), grads, state.optimizer, lr)
            vectors.update(zip(names, self._vectors(trained, state.step.device), strict=True))
        else:
            own = {name: self._own_slice(vectors[name]) for name in names}
            grads = dict(zip(names, slices, strict=True))
            updated, optimizer = self.optimizer.update(own, grads, state.optimizer, lr)
            vectors.update({name: _all_gathered(x) for name, x in updated.items()})
        return list(vectors.values()), optimizer

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


def shard_state(seed: Value, step: Value) -> Value:
    """`ops.rng_state` of a shard, from a row (3,) of `shard_seeds` and the step, int64 ()."""
    with scope("random"):
        words = [ops.slice(seed, [0], [2]), ops.slice(seed, [2], [3])]
        state = random_state(words[0], step)
        place = ops.astype(words[1], np.float64) * 2.0**SHARD_BIT
        high = ops.astype(ops.slice(state, [3], [4]), np.float64) + place
        return ops.concatenate([ops.slice(state, [0], [3]), ops.astype(high, np.uint32)])
