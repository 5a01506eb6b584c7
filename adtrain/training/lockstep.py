"""Several shards on one rank that exchange values, such as the statistics of synchronized batch norm.

All shards are computed in lockstep: one after the other up to an exchange, then the exchange, and so on.
"""

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
