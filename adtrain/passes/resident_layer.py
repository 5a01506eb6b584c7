"""The first layer of a member whose weights can stay on chip for several steps: what it is, and when it fits.

Its inputs are bytes of a table. A cluster of thread blocks holds its weights and what the optimizer keeps for them in
shared memory (kernels/cuda/gemm/resident_layer.cuh).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adtrain.core.fused import body_of, gather_p, product_p
from adtrain.core.precision import FULL
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable

BYTE, FLOAT = np.dtype(np.uint8), np.dtype(np.float32)
TILE = 16
"""Inputs, units and examples are whole tiles of tensor cores."""
MAX_BATCH = 64
"""Most examples of a batch, for whose outputs a warp has registers."""
MAX_TABLE = 1 << 32
"""Bytes of the table that 32-bit offsets reach."""
CLUSTERS = 1, 2, 4, 8
"""Numbers of blocks of a cluster; any GPU that has clusters runs 8."""
THREADS = 512
WARPS = THREADS // 32
TERMS, SLOTS = 2, 2
"""float16 terms of a float32; partial sums of all outputs that warps exchange at a time."""
PART_SHARED = 20 << 10
"""Most bytes of shared memory of the other equations of a step."""
AFFINE = frozenset(("astype", "mul", "add", "sub", "div"))
"""Operations by which a byte may become an input, each with one number."""


@dataclass(frozen=True)
class ResidentLayer:
    """A first layer, in the Program of one member.

    Attributes:
        gather: the equation that reads the batch from a table of bytes, by a row of a table of indices.
        position: the number of that row, and its value in the next step.
        forward: the product of the batch and the weights, with its epilogue.
        backward: the product for the weights' gradient, whose epilogue is the update.
        states: the weights, then what the optimizer keeps for them: the values before and after the step.
    """

    gather: Equation
    position: tuple[Variable, Variable]
    forward: Equation
    backward: Equation
    states: Sequence[tuple[Variable, Variable]]

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Examples of a batch, inputs and units."""
        (batch, inputs), (units, _) = (v.type.shape for v in body_of(self.forward).equations[0].inputs)
        return batch, inputs, units

    def shared_bytes(self, blocks: int) -> tuple[int, int]:
        """Shared memory of each of the blocks of a cluster: for what it holds between steps, and for work in a step."""
        batch, inputs, units = self.lengths
        own, steps = units // blocks, batch // TILE
        groups = WARPS * TILE // own
        states = len(self.states) * inputs * own * FLOAT.itemsize
        sums = (groups + 2 * steps) * own * FLOAT.itemsize + batch * np.dtype(np.uint32).itemsize
        operands = (TERMS * np.dtype(np.float16).itemsize + SLOTS * FLOAT.itemsize) * own * batch
        return states + sums, max(operands, PART_SHARED)

    def blocks(self, shared: int) -> int | None:
        """The fewest blocks that hold the layer in so many bytes of shared memory each; None if no cluster does."""
        units = self.lengths[2]
        whole = [n for n in CLUSTERS if units % (n * TILE) == 0 and WARPS % (units // n // TILE) == 0]
        return next((n for n in whole if sum(self.shared_bytes(n)) <= shared), None)


def carried(body: Program) -> dict[Variable, Variable]:
    """For each input of a member's Program that a step replaces, its value in the next step. They come first."""
    return dict(zip(body.inputs, body.outputs, strict=False))


def resident_layer(body: Program) -> ResidentLayer | None:
    """The layer of a member's Program whose weights can stay on chip; None if there is none."""
    views = {e.outputs[0]: e.inputs[0] for e in body.equations if e.has(Trait.RESHAPE)}

    def source(v: Variable) -> Variable:
        while v in views:
            v = views[v]
        return v

    gathers = [e for e in body.equations if e.primitive is gather_p and _affine_in_bytes(e)]
    if len(gathers) != 1:
        return None
    images = gathers[0].outputs[0]
    readers = [e for e in body.equations if not e.has(Trait.RESHAPE) and images in map(source, e.inputs)]
    if len(readers) != 2 or not all(e.primitive is product_p for e in readers):
        return None
    forward, backward = readers
    first, last = (e.params["body"].equations[0] for e in readers)
    kinds = [(e.params["transpose_a"], e.params["transpose_b"], e.params["precision"]) for e in (first, last)]
    if kinds != [(False, True, FULL), (True, False, FULL)] or source(first.inputs[0]) is not images:
        return None
    weights, following = first.inputs[1], carried(body)
    rows, of_row = takes(gathers[0])
    position = of_row.inputs[1]
    arrays = [weights, *(v for v in backward.inputs if v.size > 1 and v not in (*last.inputs, weights))]
    if position not in following or not set(arrays) <= following.keys() or weights not in backward.inputs:
        return None
    states = [(v, following[v]) for v in arrays]
    layer = ResidentLayer(gathers[0], (position, following[position]), forward, backward, states)
    alone = source(last.inputs[1]) is images and {after for _, after in states} == set(backward.outputs)
    alone = alone and all(len(body.readers[v]) == (2 if v is weights else 1) for v in arrays)
    batch, inputs, units = layer.lengths
    whole = not (batch % TILE or inputs % TILE or units % TILE) and batch <= MAX_BATCH
    whole = whole and all(v.type == weights.type and v.type.dtype == FLOAT for v in arrays)
    small = rows.inputs[0].size < MAX_TABLE
    return layer if alone and whole and small and _in_order(body, layer) else None


def _in_order(body: Program, layer: ResidentLayer) -> bool:
    """Whether the product with the batch comes first, and the next batch is known two supersteps before the last."""
    found = supersteps(body, layer)
    known = next((found[e] for e in found if layer.position[1] in e.outputs), None)
    return found[layer.forward] == 0 and known is not None and known + 2 <= found[layer.backward]


def supersteps(body: Program, layer: ResidentLayer) -> dict[Equation, int]:
    """The number of barriers of the cluster in a step before each equation: it runs after those that it depends on. The
    update of the weights comes last."""
    ready: dict[Variable, int] = {}
    found: dict[Equation, int] = {}
    for e in body.equations:
        number = max((ready.get(v, 0) for v in e.inputs), default=0)
        if e.has(Trait.RESHAPE) or e is layer.gather:
            ready |= dict.fromkeys(e.outputs, number)
        else:
            found[e] = number
            ready |= dict.fromkeys(e.outputs, number + 1)
    found[layer.backward] = max(found.values())
    return found


def takes(gather: Equation) -> Sequence[Equation]:
    """The gather of rows from a table of bytes, then that of their indices, which are a row of a table themselves."""
    body = body_of(gather)
    producer = {v: e for e in body.equations for v in e.outputs}
    rows = next(e for e in body.equations if e.has(Trait.GATHER) and e.inputs[0].type.dtype == BYTE)
    return rows, producer[rows.inputs[1]]


def input_of_byte(gather: Equation) -> tuple[Program, Sequence[Variable]]:
    """The elementwise equations that make an input of a byte, its first argument; and the numbers that they read."""
    body, (rows, _) = body_of(gather), takes(gather)
    equations = tuple(m for e in body.equations if not e.has(Trait.GATHER) for m in body_of(e).equations)
    made = {v for e in equations for v in e.outputs}
    (byte,) = rows.outputs
    numbers = [v for v in dict.fromkeys(v for e in equations for v in e.inputs) if v not in made and v is not byte]
    return Program((byte, *numbers), {}, equations, body.outputs), numbers


def _affine_in_bytes(gather: Equation) -> bool:
    """Whether it gathers rows of bytes by a row of indices, and makes each byte float32 ``scale * byte + shift``."""
    body = body_of(gather)
    gathers = [e for e in body.equations if e.has(Trait.GATHER)]
    tables = [e.inputs[0].type.dtype for e in gathers]
    if len(gathers) != 2 or tables.count(BYTE) != 1 or len(body.outputs) != 1 or body.outputs[0].type.dtype != FLOAT:
        return False
    if not any(e.outputs[0] in others.inputs for e in gathers for others in gathers):
        return False
    program, numbers = input_of_byte(gather)
    if any(v.size != 1 for v in numbers):
        return False
    constant, affine = set(numbers), {program.inputs[0]}
    for e in program.equations:
        name, known = e.primitive.name, affine & {*e.inputs}
        if name == "broadcast_to" and not known:
            constant.update(e.outputs)
            continue
        whole = name == "astype" and e.outputs[0].type.dtype.kind != "f"
        nonlinear = len(known) != 1 or (name == "div" and e.inputs[0] not in known)
        if name not in AFFINE or whole or nonlinear or not {*e.inputs} <= known | constant:
            return False
        affine.update(e.outputs)
    return body.outputs[0] in affine
