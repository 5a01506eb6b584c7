"""Exchange fusion: optimizer updates run in the launch that exchanges gradients before them and parameters after them.

For GPUs that have mapped each other's memory. Several exchanges of a step, of a few bytes too, become one launch on the
main stream.

The kernel is in `kernels/cuda/index/peer_exchanges.cuh`. An update has the same arithmetic as the same equation without
exchanges, so its results have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, permutations

from adtrain.backends.cuda.codegen.block_rules import rule_of
from adtrain.backends.cuda.codegen.loops import Loops, flat, loops, of_body
from adtrain.backends.cuda.codegen.part import (
    Kernel,
    Names,
    Part,
    Step,
    StepRule,
    aligned_to_vector,
    indented,
    kernel,
    resident_blocks,
)
from adtrain.backends.cuda.forms import Form, define
from adtrain.backends.cuda.forms.horizontal import MAX_POINTERS, blocks_in_launch, join_loops
from adtrain.backends.cuda.forms.one_block import ONE_BLOCK, names_of, one_block, part_of
from adtrain.backends.cuda.peer_window import GATHERED_BYTES, SLOT_BYTES, THREADS, macros
from adtrain.codegen.elementwise import c_type, pointer
from adtrain.core import communicator
from adtrain.core.kernel import WARP, Target
from adtrain.core.primitive import Trait
from adtrain.core.program import HORIZONTAL, OVERWRITES, Equation, Program, Variable, body_of, fuse
from adtrain.core.staging import Results, keeps
from adtrain.passes.fusion import by_element, is_loops
from adtrain.passes.groups import Groups
from adtrain.passes.plan_memory import of_one_type

PEER_EXCHANGES = "peer_exchanges"
"""Independent exchanged_update, all_gather, gathered, loops and small equations in one launch, on GPUs that have mapped
each other's memory."""

GATHERED = "gathered"
"""An all-gather of a few bytes, and small equations that read what it receives."""

EXCHANGED_UPDATE = "exchanged_update"
"""An all-to-all of gradients, elementwise equations with the received slices, and an all-gather of one result.

Vectors of parameters, and single numbers, are the same on all ranks."""

ALIGNMENT = 16
"""Bytes: slices of vectors must be multiples, and items of all-gathers start at multiples."""
MAX_GATHERED = 4 << 10
"""The most bytes that a rank sends in an all-gather of the same launch: one block does it."""


@keeps(Results.EXACT)
def fuse_exchanges(program: Program, limit: int) -> Program:
    """``program`` with one `peer_exchanges` equation for all updates between exchanges, and for short all-gathers.

    Nothing is fused if the updates exchange slices of more than ``limit`` bytes together, or if something else reads
    the gradients, such as a norm for clipping.
    """
    divided = replace(program, equations=tuple(_without_horizontals(program)))
    exchanges = [e for e in divided.equations if e.primitive.name == "all_to_all"]
    found = [members for e in exchanges if (members := _updated(divided, e))]
    total = sum(e.outputs[0].nbytes // e.params["ranks"] for e, *_ in found)
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
    """The equations, with its members in place of a horizontal equation that updates, or follows all exchanges."""
    last = max((i for i, e in enumerate(program.equations) if e.has(Trait.COLLECTIVE)), default=0)
    equations: list[Equation] = []
    for i, e in enumerate(program.equations):
        divided = e.form == HORIZONTAL and (e.phase == "update" or i > last)
        equations += e.params["body"].equations if divided else (e,)
    return equations


def _updated(program: Program, exchange: Equation) -> list[Equation] | None:
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
    if len(rows) != ranks or len(readers) != 1 or length * received.type.dtype.itemsize % ALIGNMENT:
        return None
    (update,) = readers
    whole = [v.size in (1, length) for v in update.inputs] + [v.type.shape == (length,) for v in update.outputs]
    if not by_element(update) or not all(whole):
        return None
    for v in update.inputs:
        e = program.producer.get(v)
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
        if not groups.merge_independent(first, i):
            raise AssertionError("fuse_exchanges: an update depends on another update")
    chosen, space = set(), GATHERED_BYTES
    for i, e in enumerate(program.equations):
        if e.primitive.name == "all_gather":
            size = -(-e.inputs[0].nbytes // ALIGNMENT) * ALIGNMENT
            if size <= min(MAX_GATHERED, space) and groups.are_independent(first, i):
                space -= size
                chosen.add(e.inputs[0])
                _merge_readers(groups, first, i)
    program = groups.rewritten(_together)
    groups = Groups(program)
    first = next(i for i, e in enumerate(program.equations) if e.form == PEER_EXCHANGES)
    for i, e in enumerate(program.equations):
        if e.form == GATHERED or (e.primitive.name == "all_gather" and e.inputs[0] in chosen):
            groups.merge_independent(first, i)
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
    fits = all(_in_one_block(groups.equations[i]) and groups.are_independent(first, i) for i in readers)
    chained = any(groups.order.reaches(groups.of[a], groups.of[b]) for a, b in permutations(readers, 2))
    launch = [*groups.group_of(first), *(groups.equations[i] for i in readers)]
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


HEADERS = ("index/peer_exchanges.cuh",)
VECTOR = 16
"""Bytes that a thread moves at once."""
RESIDENT = 2
"""Blocks for which a multiprocessor has registers, so that other parts run while the updates wait for the peers."""
SPAN = 16
"""The elements of a warp are a multiple of this, so that they are whole vectors of any type."""


def peer_exchanges(equation: Equation, target: Target) -> Kernel:
    """The kernel of a `peer_exchanges` equation. Each equation in its body has blocks of its own."""
    members = equation.params["body"].equations
    updates = [e for e in members if e.form == EXCHANGED_UPDATE]
    gathers = [e for e in members if e.has(Trait.COLLECTIVE) or e.form == GATHERED]
    ranks = body_of(updates[0]).equations[0].params["ranks"]
    slices = [body_of(e).equations[0].outputs[0].nbytes // ranks for e in updates]
    items = [aligned_to_vector(body_of(e).equations[0].inputs[0].nbytes) for e in gathers]
    whole = len(updates) == 1 and _exchanges_whole(updates[0], ranks)
    others = [e for e in members if e not in updates and e not in gathers]
    beside = [loops(e).part(THREADS, target) if is_loops(e) else one_block(e, THREADS) for e in others]
    gathered = [_gathered(e, sum(items[:i])) for i, e in enumerate(gathers)]
    most = _most_blocks(len(updates), [*gathered, *beside], len(gathered), target)
    parts = [_update(e, f"update{i}", sum(slices[:i]), ranks, most, whole) for i, e in enumerate(updates)]
    parts = [*_with_shares([*parts, *gathered]), *beside]
    return kernel("peer_exchanges", parts, THREADS, resident=RESIDENT, macros=macros(ranks))


def _most_blocks(updates: int, others: Sequence[Part], gathers: int, target: Target) -> int:
    """Maximum blocks of each update. All blocks that wait for peers fit on the GPU at the same time. Otherwise blocks
    of two ranks could wait for each other, while the blocks that they wait for have not begun. The other blocks end by
    themselves."""
    resident = resident_blocks(max(part.shared for part in others), target) if others else RESIDENT
    return max(min(target.multiprocessors, (resident * target.multiprocessors - gathers) // updates), 1)


def _with_shares(parts: Sequence[Part]) -> list[Part]:
    """The parts that exchange data, with a statement by which each block adds its share to the counter of launches."""
    starts = [0, *accumulate(part.blocks for part in parts)]
    added = (f"add_share(windows, {start} + block, {starts[-1]});" for start in starts)
    return [replace(part, lines=[*part.lines, line]) for part, line in zip(parts, added, strict=False)]


def _gathered(equation: Equation, at: int) -> Part:
    """The part of an all-gather, and of the small equations that read what it receives.

    Args:
        at: the byte in a slot where its items start.
    """

    def form(e: Equation) -> StepRule:
        return gather if e.has(Trait.COLLECTIVE) else rule_of(e)

    def gather(e: Equation, names: Names, threads: int) -> Sequence[Step]:
        sent, received = (names[v] for v in (*e.inputs, *e.outputs))
        places = f"(const char *){sent}, (char *){received}, {at}, {e.inputs[0].nbytes}"
        return [Step([f"gather_from_peers(windows, {places});"], threads)]

    body = body_of(equation)
    part = part_of(body, names_of(body), THREADS, forms=form)
    return replace(part, headers=(*part.headers, *HEADERS), peers=True)


def _exchanges_whole(update: Equation, ranks: int) -> bool:
    """Whether ranks exchange whole gradients, and each computes the whole update.

    This takes one round in place of two, and between two ranks it sends as many bytes. It is possible if no optimizer
    state is divided among the ranks, and if the gradients fit in a slot.
    """
    sent = body_of(update).equations[0].inputs[0]
    divided = any(v.size == sent.size // ranks for v in (*update.inputs, *update.outputs))
    return ranks == 2 and not divided and sent.nbytes <= SLOT_BYTES


def _update(equation: Equation, name: str, at: int, ranks: int, most: int, whole: bool) -> Part:
    """The part of an `exchanged_update` equation.

    Args:
        at: the byte in a slot where its slices, or its vectors, start.
        most: maximum of blocks.
        whole: whether ranks exchange whole gradients.
    """
    body: Program = equation.params["body"]
    producer = body.producer
    sent, length = body.equations[0].inputs[0], body.equations[0].outputs[0].size // ranks
    gather, joined = body.equations[-2:]
    update = producer[gather.inputs[0]]
    updated = of_body(flat(body_of(update)))
    inputs = {v: f"x{i}" for i, v in enumerate(equation.inputs)}
    outputs = {v: f"y{i}" for i, v in enumerate(equation.outputs)}
    vector = outputs[joined.outputs[0]]

    def argument(v: Variable) -> str:
        """The first element of a part."""
        e = producer.get(v)
        if e is None:
            return f"{inputs[v]} + part.start" if v.size == length else inputs[v]
        if e.has(Trait.SUBVIEW):
            return f"{inputs[e.inputs[0]]} + part.own"
        row = producer[e.inputs[0]].params["starts"][0]  # a reshape of a row of what was received
        return f"part.received({inputs[sent]}, {row})"

    def result(v: Variable) -> str:
        return f"part.updated({vector})" if v in gather.inputs else f"{outputs[v]} + part.start"

    elements = length * ranks if whole else length
    vectors, warps = -(-elements * sent.type.dtype.itemsize // VECTOR), THREADS // WARP
    blocks = min(-(-vectors // THREADS), most)
    span = -(-elements // (blocks * warps * SPAN)) * SPAN
    blocks = -(-elements // (span * warps))
    kind = "WholeExchange" if whole else "SliceExchange"
    lines = [
        f"const {kind}<{c_type(sent.type.dtype)}> part(windows, {at}, {elements}, {span}, block);",
        f"part.send({inputs[sent]});",
        f"{name}({', '.join([*map(argument, updated.inputs), *map(result, updated.outputs)])}, part.count);",
        f"part.finish({vector});",
    ]
    arriving = [v for v in updated.inputs if (e := producer.get(v)) is not None and not e.has(Trait.SUBVIEW)]
    definition = _function(name, updated, arriving, None if whole else gather.inputs[0])
    return Part(lines, equation.inputs, equation.outputs, HEADERS, definition, blocks, peers=True)


def _function(name: str, loops: Loops, arriving: Sequence[Variable], everywhere: Variable | None) -> str:
    """A function that updates the elements of a warp. Its arguments are pointers to them, and their number.

    Args:
        arriving: inputs that ranks send.
        everywhere: the result that is stored on all ranks, if there is one.
    """
    parameters = []
    for i, v in enumerate(loops.inputs):
        kind = f"const Arriving<{c_type(v.type.dtype)}> &" if v in arriving else pointer(v, const=True)
        parameters.append(f"{kind}x{i}")
    for i, v in enumerate(loops.outputs):
        kind = f"const Everywhere<{c_type(v.type.dtype)}> &" if v is everywhere else pointer(v)
        parameters.append(f"{kind}y{i}")
    lines = [f"const int first = threadIdx.x % {WARP}, step = {WARP};", *loops.lines]
    head = f"static __device__ __forceinline__ void {name}({', '.join(parameters)}, int n)"
    return "\n".join([head, "{", *indented(lines), "}"])


define(Form(PEER_EXCHANGES, lambda equation, target: [peer_exchanges(equation, target)]))
OVERWRITES[EXCHANGED_UPDATE] = of_one_type  # it reads its own slice of the parameters only, element by element
