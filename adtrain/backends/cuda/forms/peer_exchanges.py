"""One kernel for exchanges between mapped GPUs and the optimizer updates: kernels/cuda/index/peer_exchanges.cuh.

An update has the same arithmetic as the same equation without exchanges, so its results have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from adtrain.backends.cuda.codegen.block_steps import Names, Step, StepRule
from adtrain.backends.cuda.codegen.loops import Loops, flat, loops, of_body
from adtrain.backends.cuda.codegen.one_block_forms import form_of
from adtrain.backends.cuda.codegen.part import Kernel, Part, aligned_to_vector, indented, kernel, resident_blocks
from adtrain.backends.cuda.forms.form import Form, define
from adtrain.backends.cuda.forms.one_block import names_of, one_block, part_of
from adtrain.backends.cuda.peer_window import SLOT_BYTES, THREADS, macros
from adtrain.codegen.expressions import c_type, pointer
from adtrain.core.fused import EXCHANGED_UPDATE, GATHERED, OVERWRITES, PEER_EXCHANGES, body_of
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.target import Target
from adtrain.passes.fuse_elementwise import is_loops
from adtrain.passes.places import nbytes, of_one_type

HEADERS = ("index/peer_exchanges.cuh",)
VECTOR = 16
"""Bytes that a thread moves at once."""
WARP = 32
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
    slices = [nbytes(body_of(e).equations[0].outputs[0]) // ranks for e in updates]
    items = [aligned_to_vector(nbytes(body_of(e).equations[0].inputs[0])) for e in gathers]
    whole = len(updates) == 1 and _exchanges_whole(updates[0], ranks)
    others = [e for e in members if e not in updates and e not in gathers]
    beside = [loops(e).part(THREADS, target) if is_loops(e) else one_block(e, THREADS) for e in others]
    gathered = [_gathered(e, sum(items[:i])) for i, e in enumerate(gathers)]
    most = _most_blocks(len(updates), [*gathered, *beside], len(gathered), target)
    parts = [_update(e, f"update{i}", sum(slices[:i]), ranks, most, whole) for i, e in enumerate(updates)]
    parts = [*_with_shares([*parts, *gathered]), *beside]
    made = kernel("peer_exchanges", parts, THREADS, resident=RESIDENT)
    options = tuple(f"-D{name}={value}" for name, value in macros(ranks).items())
    return replace(made, source=made.source._replace(options=(*made.source.options, *options)))


def _most_blocks(updates: int, others: Sequence[Part], gathers: int, target: Target) -> int:
    """Maximum blocks of each update. All blocks that wait for peers fit on the GPU at the same time: else those of two
    ranks could wait for blocks of the other one that have not begun. The other blocks end by themselves."""
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
        return gather if e.has(Trait.COLLECTIVE) else form_of(e)

    def gather(e: Equation, names: Names, threads: int) -> Sequence[Step]:
        sent, received = (names[v] for v in (*e.inputs, *e.outputs))
        places = f"(const char *){sent}, (char *){received}, {at}, {nbytes(e.inputs[0])}"
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
    return ranks == 2 and not divided and nbytes(sent) <= SLOT_BYTES


def _update(equation: Equation, name: str, at: int, ranks: int, most: int, whole: bool) -> Part:
    """The part of an `exchanged_update` equation.

    Args:
        at: the byte in a slot where its slices, or its vectors, start.
        most: maximum of blocks.
        whole: whether ranks exchange whole gradients.
    """
    body: Program = equation.params["body"]
    producer = {v: e for e in body.equations for v in e.outputs}
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


define(Form(PEER_EXCHANGES, lambda equation, lowering: [peer_exchanges(equation, lowering.target)]))
OVERWRITES[EXCHANGED_UPDATE] = of_one_type  # it reads its own slice of the parameters only, element by element
