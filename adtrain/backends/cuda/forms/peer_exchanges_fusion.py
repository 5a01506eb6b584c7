"""Exchange fusion: optimizer updates run in the launch that exchanges gradients before them and parameters after them.

For GPUs that have mapped each other's memory. Several exchanges of a step, of a few bytes too, become one launch on the
main stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

from adtrain.backends.cuda.forms.horizontal_fusion import MAX_POINTERS, blocks_in_launch
from adtrain.backends.cuda.forms.join_horizontals import independent, join_loops, merge_independent
from adtrain.core import communicator
from adtrain.core.fused import (
    EXCHANGED_UPDATE,
    GATHERED,
    HORIZONTAL,
    ONE_BLOCK,
    PEER_EXCHANGES,
    fuse,
)
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.passes.fuse_elementwise import by_element, is_loops
from adtrain.passes.groups import Groups
from adtrain.passes.places import nbytes

VECTOR = 16
"""Bytes: slices of vectors must be multiples, and items of all-gathers start at multiples."""
MAX_GATHERED = 4 << 10
"""The most bytes that a rank sends in an all-gather of the same launch: one block does it."""
GATHERED_BYTES = 64 << 10
"""The most bytes that a rank sends in all these all-gathers together."""


@keeps(Results.EXACT)
def fuse_exchanges(program: Program, limit: int) -> Program:
    """``program`` with one `peer_exchanges` equation for all updates between exchanges, and for short all-gathers.

    Nothing is fused if the updates exchange slices of more than ``limit`` bytes together, or if something else reads
    the gradients, such as a norm for clipping.
    """
    divided = replace(program, equations=tuple(_without_horizontals(program)))
    exchanges = [e for e in divided.equations if e.primitive.name == "all_to_all"]
    found = [members for e in exchanges if (members := _update(divided, e))]
    total = sum(nbytes(e.outputs[0]) // e.params["ranks"] for e, *_ in found)
    if not found or total > limit:
        return program
    groups = Groups(divided)
    position = {e: i for i, e in enumerate(divided.equations)}
    for members in found:
        first, *others = (position[e] for e in members)
        for i in others:
            groups.merge(groups.of[first], groups.of[i])
    return _one_launch(groups.rewritten(_alone))


def _without_horizontals(program: Program) -> Sequence[Equation]:
    """The equations, with the members in place of each horizontal equation of updates, or after the last exchange."""
    last = max((i for i, e in enumerate(program.equations) if e.has(Trait.COLLECTIVE)), default=0)
    equations: list[Equation] = []
    for i, e in enumerate(program.equations):
        divided = e.form == HORIZONTAL and (e.phase == "update" or i > last)
        equations += e.params["body"].equations if divided else (e,)
    return equations


def _update(program: Program, exchange: Equation) -> list[Equation] | None:
    """The equations from an all-to-all of gradients to the all-gather of parameters; None if they cannot be fused."""
    (received,), ranks = exchange.outputs, exchange.params["ranks"]
    length = received.size // ranks
    members, rows = [exchange], []
    for row in program.readers.get(received, ()):
        after = program.readers.get(row.outputs[0], ())
        if row.primitive.name != "slice" or len(after) != 1 or not after[0].has(Trait.RESHAPE):
            return None
        members += [row, after[0]]
        rows.append(after[0].outputs[0])
    readers = {e for v in rows for e in program.readers.get(v, ())}
    if len(rows) != ranks or len(readers) != 1 or length * received.type.dtype.itemsize % VECTOR:
        return None
    (update,) = readers
    whole = [v.size in (1, length) for v in update.inputs] + [v.type.shape == (length,) for v in update.outputs]
    if not by_element(update) or not all(whole):
        return None
    producer = {v: e for e in program.equations for v in e.outputs}
    for v in update.inputs:
        e = producer.get(v)
        if e is not None and e.has(Trait.SUBVIEW):
            own = e.params["start"] == communicator.current().rank * length and v.size == length
            if not own or len(program.readers[v]) > 1:
                return None
            members.append(e)
    after = [e for v in update.outputs for e in program.readers.get(v, ()) if e.primitive.name == "all_gather"]
    if len(after) != 1 or len(program.readers[after[0].inputs[0]]) > 1:
        return None
    joined = program.readers.get(after[0].outputs[0], ())
    if len(joined) != 1 or not joined[0].has(Trait.RESHAPE):
        return None
    return [*members, update, after[0], joined[0]]


def _one_launch(program: Program) -> Program:
    """One equation for all updates, and for short all-gathers that are independent of them."""
    groups = Groups(program)
    first, *others = (i for i, e in enumerate(program.equations) if e.form == PEER_EXCHANGES)
    for i in others:
        if not merge_independent(groups, first, i):
            raise AssertionError("fuse_exchanges: an update depends on another update")
    chosen, space = set(), GATHERED_BYTES
    for i, e in enumerate(program.equations):
        if e.primitive.name == "all_gather":
            size = -(-nbytes(e.inputs[0]) // VECTOR) * VECTOR
            if size <= min(MAX_GATHERED, space) and independent(groups, first, i):
                space -= size
                chosen.add(e.inputs[0])
                _merge_readers(groups, first, i)
    program = groups.rewritten(_together)
    groups = Groups(program)
    first = next(i for i, e in enumerate(program.equations) if e.form == PEER_EXCHANGES)
    for i, e in enumerate(program.equations):
        if e.form == GATHERED or (e.primitive.name == "all_gather" and e.inputs[0] in chosen):
            merge_independent(groups, first, i)
    return join_loops(groups.rewritten(_together))


def _merge_readers(groups: Groups, first: int, gather: int) -> None:
    """Merge an all-gather with the equations that read what it receives.

    Nothing is merged unless one block can compute all of them, without the results of the updates and of each other.
    """
    read, members = list(groups.equations[gather].outputs), list[int]()
    for i, e in enumerate(groups.equations):
        if not set(read).isdisjoint(e.inputs):
            members.append(i)
            read += e.outputs if e.is_view else ()
    readers = [i for i in members if not groups.equations[i].is_view]
    fits = all(_in_one_block(groups.equations[i]) and independent(groups, first, i) for i in readers)
    chained = any(groups.order.reaches(groups.of[a], groups.of[b]) for a, b in permutations(readers, 2))
    launch = [groups.equations[i] for i in (*groups.members[groups.of[first]], *readers)]
    pointers = {v for e in launch for v in (*e.inputs, *e.outputs)}
    if fits and not chained and len(pointers) <= MAX_POINTERS and set(read).isdisjoint(groups.program.outputs):
        for i in members:
            groups.merge(groups.of[gather], groups.of[i])


def _in_one_block(e: Equation) -> bool:
    """Whether one block computes an equation with the same bits, whatever its number of threads."""
    members = e.params["body"].equations if e.form == ONE_BLOCK else (e,)
    return blocks_in_launch(e) == 1 and all(is_loops(x) or x.is_view or x.primitive.name == "slice" for x in members)


def _alone(members: Sequence[Equation], needed: Sequence[Variable]) -> Equation:
    return fuse(PEER_EXCHANGES, [fuse(EXCHANGED_UPDATE, members, needed)], needed)


def _together(equations: Sequence[Equation], needed: Sequence[Variable]) -> Equation:
    whole = PEER_EXCHANGES if any(e.form == PEER_EXCHANGES for e in equations) else GATHERED
    joined = (PEER_EXCHANGES, ONE_BLOCK)
    bodies = [e.params["body"].equations if e.form in joined else (e,) for e in equations]
    return fuse(whole, [member for body in bodies for member in body], needed)
