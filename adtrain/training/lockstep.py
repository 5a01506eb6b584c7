"""The shards of a batch in lockstep: each is computed up to an exchange, then the next one; then they exchange."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from adtrain import ops
from adtrain.core import tree
from adtrain.core.array import Value
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.scope import at
from adtrain.core.staging import stage
from adtrain.core.trace import bind
from adtrain.ops.collectives import fusion_barrier, gather_shards_p, pairwise_sum, tree_sum
from adtrain.training.sharding import Sharding


class _Exchange(NamedTuple):
    """An exchange that a shard has come to, and what it sends."""

    equation: Equation
    sent: Value


def in_lockstep(
    functions: Sequence[Callable[..., Sequence[Value]]], arguments: Sequence[Sequence[Any]], sharding: Sharding
) -> list[list[Value]]:
    """The results of a function for each of this rank's shards, which may call `ops.gather_shards`.

    All functions have the same exchanges. Fusion barriers separate the shards, as far as they are computed between two
    exchanges, so the bits of one do not depend on which others this rank has.
    """
    running = [
        _computed(stage(f).trace(*given)[0], tree.leaves(tuple(given)))
        for f, given in zip(functions, arguments, strict=True)
    ]
    received: list[Any] = [None] * len(running)
    while True:
        reached, results = list[_Exchange](), list[list[Value]]()
        for shard, value in zip(running, received, strict=True):
            try:
                reached.append(shard.send(value))
            except StopIteration as end:
                results.append(end.value)
        if results:
            return results
        received = _exchanged(reached, sharding)


def _computed(program: Program, arguments: Sequence[Value]) -> Generator[_Exchange, Value, list[Value]]:
    """Run the equations one by one. Yields each exchange, and is sent what it receives."""
    known: dict[Variable, Value] = {**program.constants, **dict(zip(program.inputs, arguments, strict=True))}
    for e in program.equations:
        given = [known[v] for v in e.inputs]
        if e.has(Trait.SHARD_EXCHANGE):
            found: Any = yield _Exchange(e, fusion_barrier(*given)[0])
        else:
            with at(e.scope, e.phase):
                found = bind(e.primitive, *given, **e.params)
        known.update(zip(e.outputs, (found,) if isinstance(found, Value) else found, strict=True))
    return [known[v] for v in program.outputs]


def _exchanged(reached: Sequence[_Exchange], sharding: Sharding) -> list[Value]:
    """What each of this rank's shards receives."""
    first, sent = reached[0].equation, [exchange.sent for exchange in reached]
    with at(first.scope, first.phase):
        if first.primitive is gather_shards_p:
            every = ops.reshape(ops.all_gather(ops.stack(sent)), (sharding.shards, *sent[0].shape))
            return list(fusion_barrier(every)) * len(sent)
        shape = sent[0].shape[1:]
        by_rank = ops.reshape(pairwise_sum(sent), (sharding.ranks, sharding.per_rank, *shape))
        own = tree_sum(ops.all_to_all(by_rank))
        rows = [ops.slice(own, [k, *[0] * len(shape)], [k + 1, *shape]) for k in range(len(sent))]
        return list(fusion_barrier(*(ops.reshape(row, shape) for row in rows)))
