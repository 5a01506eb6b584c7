"""Views in place of copies: subviews in place of slices, concat views in place of concatenations.

So the gradients of a bucket are computed in the memory that an exchange sends. Applied after all other passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod

from adtrain.core.program import HORIZONTAL, Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.core.views import concat_view_p, subview_p
from adtrain.passes.fusion import is_loops
from adtrain.passes.plan_memory import ALIGNMENT


@keeps(Results.EXACT)
def place_views(program: Program) -> Program:
    """``program`` with views in place of the slices and concatenations that need no copy.

    All values begin at multiples of ALIGNMENT. A value that the Program returns is not a view, nor is a slice of a
    donated input.
    """
    owner: dict[Variable, Variable] = {}  # for each view, the value whose memory it shares
    for e in program.equations:
        if e.is_view:
            owner[e.outputs[0]] = owner.get(e.inputs[0], e.inputs[0])
    returned = {owner.get(v, v) for v in program.outputs}
    joinable: dict[Variable, Equation] = {}  # values with memory of their own, and what computes them
    equations: list[Equation] = []
    for e in program.equations:
        start = _start(e)
        if start is not None and returned.isdisjoint(e.outputs):
            whole = owner.get(e.inputs[0], e.inputs[0])
            if whole not in program.donated:
                e = replace(e, primitive=subview_p, params={"start": start, "shape": e.outputs[0].type.shape})
                owner[e.outputs[0]] = whole
        elif e.primitive.name == "concatenate" and e.params["axis"] == 0 and returned.isdisjoint(e.outputs):
            parts = [owner.get(v, v) for v in e.inputs]
            makers = [joinable.pop(v, None) for v in parts]  # a value can be a part of one array only
            if _fit(program, e.inputs, parts, makers):
                e = replace(e, primitive=concat_view_p, params={})
        if not e.is_view:
            joinable |= {v: e for v in e.outputs if v not in returned}
        equations.append(e)
    return replace(program, equations=tuple(equations))


def _start(e: Equation) -> int | None:
    """The number of a slice's first element, if the slice is contiguous and begins at an aligned byte; else None."""
    if e.primitive.name != "slice" or set(e.params["steps"]) - {1}:
        return None
    shape, found = e.inputs[0].type.shape, e.outputs[0].type.shape
    cut = [axis for axis, (n, part) in enumerate(zip(shape, found, strict=True)) if n != part]
    if not cut or prod(found[: cut[-1]]) != 1 or not prod(found):
        return None
    start = sum(first * prod(shape[axis + 1 :]) for axis, first in enumerate(e.params["starts"]))
    return None if start * e.inputs[0].type.dtype.itemsize % ALIGNMENT else start


def _fit(
    program: Program, values: Sequence[Variable], owners: Sequence[Variable], makers: Sequence[Equation | None]
) -> bool:
    """Whether values can be computed one after another in memory.

    Each must have all elements of its owner. It must begin at an aligned byte, unless a loop computes it and nothing
    else reads it.
    """
    starts = [0, *accumulate(v.nbytes for v in values)]
    return all(
        e is not None
        and v.nbytes == owner.nbytes
        and (start % ALIGNMENT == 0 or (_by_loop(owner, e) and _read_once(program, v, owner)))
        for v, owner, e, start in zip(values, owners, makers, starts, strict=False)
    )


def _read_once(program: Program, v: Variable, owner: Variable) -> bool:
    """Whether a value, its owner and the views between them have one reader each."""
    x = owner
    while len(program.readers[x]) == 1 and x is not v:
        x = program.readers[x][0].outputs[0]
    return x is v and len(program.readers[v]) == 1


def _by_loop(v: Variable, maker: Equation) -> bool:
    """Whether elementwise code computes `v`. It stores single elements where addresses are not aligned."""
    members = maker.params["body"].equations if maker.form == HORIZONTAL else (maker,)
    return all(is_loops(e) for e in members if v in e.outputs)
