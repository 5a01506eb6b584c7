"""Remove exchanges of a single rank."""

from __future__ import annotations

from dataclasses import replace

from adtrain.core.primitive import PRIMITIVES, Trait
from adtrain.core.program import Equation, Program


def fold_collectives(program: Program) -> Program:
    """``program`` with a reshape in place of each exchange that has one rank only."""
    return replace(program, equations=tuple(_folded(e) for e in program.equations))


def _folded(e: Equation) -> Equation:
    if not (e.has(Trait.COLLECTIVE) and e.params["ranks"] == 1):
        return e
    return replace(e, primitive=PRIMITIVES["reshape"], params={"shape": e.outputs[0].type.shape})
