"""Remove exchanges of a single rank or shard."""

from __future__ import annotations

from dataclasses import replace

from adtrain.core.primitive import PRIMITIVES, Trait
from adtrain.core.program import Equation, Program
from adtrain.core.staging import Results, keeps


@keeps(Results.EXACT)
def fold_collectives(program: Program) -> Program:
    """``program`` with a reshape in place of each exchange between one rank or one shard only."""
    return replace(program, equations=tuple(_folded(e) for e in program.equations))


def _folded(e: Equation) -> Equation:
    one_rank = e.has(Trait.COLLECTIVE) and e.params["ranks"] == 1
    one_shard = e.has(Trait.SHARD_EXCHANGE) and e.params["shards"] == 1
    if not (one_rank or one_shard):
        return e
    return replace(e, primitive=PRIMITIVES["reshape"], params={"shape": e.outputs[0].type.shape})
