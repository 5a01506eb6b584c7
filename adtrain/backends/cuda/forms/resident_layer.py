"""Find the first layer of a sweep's member if its weights can stay on chip for several steps, and say when they fit.

The inputs of the layer are bytes of a table. A cluster of thread blocks holds its weights and their optimizer state in
shared memory (kernels/cuda/gemm/resident_layer.cuh).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adtrain.core.fused import GATHER, PRODUCT, body_of
from adtrain.core.precision import FULL
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable

BYTE, FLOAT = np.dtype(np.uint8), np.dtype(np.float32)
TILE = 16
"""Rows and columns of a tile of the tensor cores. Inputs, units and examples are multiples of it."""
MAX_BATCH = 64
"""Examples of the largest batch whose outputs fit in the registers of a warp."""
MAX_TABLE = 1 << 32
"""The table has fewer bytes than this, so that offsets have 32 bits."""
CLUSTER_SIZES = 1, 2, 4, 8
"""Blocks of a cluster. Every GPU that has clusters runs 8."""
THREADS = 256
WARPS = THREADS // 32
TERMS = 2
"""float16 terms of a float32."""
ROW_BYTES = np.dtype(np.uint32).itemsize
"""Bytes of the number that says where an example begins in the table."""
AFFINE = frozenset(("astype", "mul", "add", "sub", "div"))
"""Operations that may make an input of a byte. Their other operand is a single number."""


@dataclass(frozen=True)
class ResidentLayer:
    """A first layer, in the Program of one member.

    Attributes:
        gather: the equation that reads the batch. A row of a table of indices says which rows of a table of bytes.
        batch_number: the row of the table of indices, before and after the step.
        forward: the product of the batch and the weights, with its epilogue.
        backward: the product for the gradient of the weights. Its epilogue is the update.
        states: the weights, then their optimizer state. Each is a pair: before and after the step.
    """

    gather: Equation
    batch_number: tuple[Variable, Variable]
    forward: Equation
    backward: Equation
    states: Sequence[tuple[Variable, Variable]]

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Examples of a batch, inputs and units."""
        return lengths_of(self.forward)

    def shared_bytes(self, blocks: int) -> tuple[int, int]:
        """Bytes of shared memory of each block of a cluster: of resident values, sums and rows, and of workspace."""
        batch, inputs, units = self.lengths
        states = len(self.states) * inputs * units // blocks * FLOAT.itemsize
        rest = sums_bytes(batch, units // blocks) + batch * ROW_BYTES
        return states + rest, max(self.operand_bytes(blocks), exchanged_bytes(batch, units // blocks))

    def operand_bytes(self, blocks: int) -> int:
        """Bytes of the terms of the gradient of a block's outputs."""
        batch, _, units = self.lengths
        return operand_bytes(batch, units // blocks)

    def blocks(self, shared: int) -> int | None:
        """The smallest cluster that holds the layer; None if none does.

        Args:
            shared: bytes of shared memory of a block.
        """
        batch, _, units = self.lengths
        for n in CLUSTER_SIZES:
            tiles, rest = divmod(units, n * TILE)
            divides = not rest and WARPS % tiles == 0
            # Each K step of the gradient has a warp of a tile of its own.
            if divides and batch // TILE <= WARPS // tiles and sum(self.shared_bytes(n)) <= shared:
                return n
        return None


def lengths_of(product: Equation) -> tuple[int, int, int]:
    """Examples of a batch, inputs and units, from the `product` equation of a layer or of its weight gradient."""
    product = body_of(product).equations[0]
    (batch, columns), (rows, inputs) = (v.type.shape for v in product.inputs)
    return (batch, inputs, columns) if product.params["transpose_a"] else (batch, inputs, rows)


def groups_of_warps(block_units: int) -> int:
    """Groups of warps in a block with so many units. A group has a warp for each 16 units. Groups divide the inputs."""
    return WARPS * TILE // block_units


def sums_bytes(batch: int, block_units: int) -> int:
    """Bytes of sums of weights, and of sums and maxima of gradients, of a block with so many units."""
    return (groups_of_warps(block_units) + 2 * (batch // TILE)) * block_units * FLOAT.itemsize


def exchanged_bytes(batch: int, block_units: int) -> int:
    """Bytes of the partial sums of outputs that the warps of a block exchange at a time."""
    groups = groups_of_warps(block_units)
    outputs = batch * block_units // THREADS
    piece = 1 if groups > 4 else math.gcd(outputs, 4)
    return (groups - 1) * THREADS * piece * FLOAT.itemsize


def operand_bytes(batch: int, block_units: int) -> int:
    """Bytes of the terms of the gradient of so many units."""
    return TERMS * np.dtype(np.float16).itemsize * block_units * batch


def carried(body: Program) -> dict[Variable, Variable]:
    """For each input of a member's Program that a step replaces, the output that replaces it. They come first."""
    return dict(zip(body.inputs, body.outputs, strict=False))


def resident_layer(body: Program) -> ResidentLayer | None:
    """The layer of a member's Program whose weights can stay on chip; None if there is none."""
    views = {e.outputs[0]: e.inputs[0] for e in body.equations if e.has(Trait.RESHAPE)}

    def source(v: Variable) -> Variable:
        while v in views:
            v = views[v]
        return v

    gathers = [e for e in body.equations if e.form == GATHER and _affine_in_bytes(e)]
    if len(gathers) != 1:
        return None

    # Two products read the batch: the forward pass, and the gradient of the weights.
    batch_inputs = gathers[0].outputs[0]
    readers = [e for e in body.equations if not e.has(Trait.RESHAPE) and batch_inputs in map(source, e.inputs)]
    if len(readers) != 2 or not all(e.form == PRODUCT for e in readers):
        return None
    forward, backward = readers
    first, last = (e.params["body"].equations[0] for e in readers)
    kinds = [(e.params["transpose_a"], e.params["transpose_b"], e.params["precision"]) for e in (first, last)]
    if kinds != [(False, True, FULL), (True, False, FULL)]:
        return None
    if source(first.inputs[0]) is not batch_inputs or source(last.inputs[1]) is not batch_inputs:
        return None

    # Only these products use the weights and their optimizer state. The second one replaces them.
    weights, following = first.inputs[1], carried(body)
    arrays = [weights, *(v for v in backward.inputs if v.size > 1 and v not in (*last.inputs, weights))]
    examples, indices = table_gathers(gathers[0])
    batch_number = indices.inputs[1]
    if batch_number not in following or not set(arrays) <= following.keys() or weights not in backward.inputs:
        return None
    states = [(v, following[v]) for v in arrays]
    if {after for _, after in states} != set(backward.outputs):
        return None
    read_once = all(len(body.readers[v]) == (2 if v is weights else 1) for v in arrays)
    if not read_once or not body.readers.keys().isdisjoint(backward.outputs):
        return None

    layer = ResidentLayer(gathers[0], (batch_number, following[batch_number]), forward, backward, states)
    batch, inputs, units = layer.lengths
    tiled = not (batch % TILE or inputs % TILE or units % TILE) and batch <= MAX_BATCH
    alike = all(v.type == weights.type and v.type.dtype == FLOAT for v in arrays)
    small = examples.inputs[0].size < MAX_TABLE
    return layer if tiled and alike and small else None


def table_gathers(gather: Equation) -> Sequence[Equation]:
    """Two gathers: of the examples from the table of bytes, and of their indices from the table of indices."""
    body = body_of(gather)
    producer = {v: e for e in body.equations for v in e.outputs}
    examples = next(e for e in body.equations if e.has(Trait.GATHER) and e.inputs[0].type.dtype == BYTE)
    return examples, producer[examples.inputs[1]]


def input_of_byte(gather: Equation) -> tuple[Program, Sequence[Variable]]:
    """The Program that makes an input of a byte, and the variables of its other arguments.

    The byte is the first argument of the Program. The others are single numbers, such as a mean.
    """
    body, (examples, _) = body_of(gather), table_gathers(gather)
    equations = tuple(m for e in body.equations if not e.has(Trait.GATHER) for m in body_of(e).equations)
    made = {v for e in equations for v in e.outputs}
    (byte,) = examples.outputs
    numbers = [v for v in dict.fromkeys(v for e in equations for v in e.inputs) if v not in made and v is not byte]
    return Program((byte, *numbers), {}, equations, body.outputs), numbers


def _affine_in_bytes(gather: Equation) -> bool:
    """Whether it gathers rows of bytes by a row of indices, and makes each byte ``scale * byte + shift`` in float32."""
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
        to_integer = name == "astype" and e.outputs[0].type.dtype.kind != "f"
        nonlinear = len(known) != 1 or (name == "div" and e.inputs[0] not in known)
        if name not in AFFINE or to_integer or nonlinear or not {*e.inputs} <= known | constant:
            return False
        affine.update(e.outputs)
    return body.outputs[0] in affine
