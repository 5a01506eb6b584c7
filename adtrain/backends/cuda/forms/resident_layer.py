"""The first layer of a sweep's member, if its weights can stay on chip, and how a cluster divides the rest of a step.

The inputs of the layer are bytes of a table. A cluster of thread blocks holds its weights and their optimizer state in
shared memory (kernels/cuda/gemm/resident_layer.cuh). Each block has some units of the layer, as in tensor parallelism
(Shoeybi et al., Megatron-LM, 2019). A value with an axis of these units is sharded: each block has the part of its own
units. All other values are replicated: each block computes them itself, with the same bits. So blocks exchange values
only where an equation adds over the units of all blocks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from adtrain.backends.cuda.codegen.loops import epilogue, flat, matmul_of
from adtrain.backends.cuda.codegen.part import indented
from adtrain.backends.cuda.forms.one_block import IN_ONE_BLOCK
from adtrain.backends.cuda.forms.row_fused import rowwise
from adtrain.codegen.elementwise import c_type, statements
from adtrain.core.precision import FULL
from adtrain.core.primitive import PRIMITIVES, Trait
from adtrain.core.program import (
    GATHER,
    PRODUCT,
    Equation,
    Program,
    Variable,
    arguments_of,
    body_of,
    joined,
    related_axes,
    single_equations,
)
from adtrain.core.types import ArrayType
from adtrain.passes.fusion import elementwise, fuse_loops

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
    product = matmul_of(product)
    (batch, columns), (rows, inputs) = (v.type.shape for v in product.inputs)
    return (batch, inputs, columns) if product.params["transpose_a"] else (batch, inputs, rows)


def groups_of_warps(block_units: int) -> int:
    """The number of groups of warps in a block. A group has a warp for each 16 units. Groups divide the inputs."""
    return WARPS * TILE // block_units


def sums_bytes(batch: int, block_units: int) -> int:
    """Bytes of sums of weights, and of sums and maxima of gradients, of a block with `block_units` units."""
    return (groups_of_warps(block_units) + 2 * (batch // TILE)) * block_units * FLOAT.itemsize


def exchanged_bytes(batch: int, block_units: int) -> int:
    """Bytes of the partial sums of outputs that the warps of a block exchange at a time."""
    groups = groups_of_warps(block_units)
    outputs = batch * block_units // THREADS
    piece = 1 if groups > 4 else math.gcd(outputs, 4)
    return (groups - 1) * THREADS * piece * FLOAT.itemsize


def operand_bytes(batch: int, block_units: int) -> int:
    """Bytes of the terms of the gradient of `block_units` units."""
    return TERMS * np.dtype(np.float16).itemsize * block_units * batch


def carried(body: Program) -> dict[Variable, Variable]:
    """For each input of a member's Program that a step replaces, the output that replaces it. They come first."""
    return dict(zip(body.inputs, body.outputs, strict=False))


def resident_layer(body: Program) -> ResidentLayer | None:
    """The layer of a member's Program whose weights can stay on chip; None if there is none."""
    source = body.before_reshapes
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
    examples = next(e for e in body.equations if e.has(Trait.GATHER) and e.inputs[0].type.dtype == BYTE)
    return examples, body.producer[examples.inputs[1]]


def input_of_byte(gather: Equation) -> tuple[Program, Sequence[Variable]]:
    """The Program that makes an input of a byte, and the variables of its other arguments.

    The byte is the first argument of the Program. The others are single numbers, such as a mean.
    """
    body, (examples, _) = body_of(gather), table_gathers(gather)
    equations = tuple(m for e in body.equations if not e.has(Trait.GATHER) for m in body_of(e).equations)
    (byte,) = examples.outputs
    numbers = [v for v in arguments_of(equations) if v is not byte]
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


IN_BLOCK = IN_ONE_BLOCK | {"standardize"}
"""The primitives that a block can compute, besides elementwise ones, reshapes and matrix products."""


@dataclass(frozen=True)
class ClusterShards:
    """The equations of a step, without the layer itself, for one block of a cluster.

    Attributes:
        axes: the axis of units of each sharded value.
        of_block: for each value that segments have, its part in a block. A replicated value is its own part.
        segments: the equations between two exchanges.
        early_gathers: gathers of the second segment that do not need the exchange before it. They load during it.
        rest: equations after the last segment, which the gradient of the layer's outputs does not need.
        partial: for each partial sum of a block the partial sums of all blocks, which later segments add.
        gathered: whether blocks exchange the outputs of the layer, after the first segment. Then these are replicated.
    """

    axes: Mapping[Variable, int]
    of_block: Mapping[Variable, Variable]
    segments: Sequence[Program]
    early_gathers: Program
    rest: Program
    partial: Mapping[Variable, Sequence[Variable]]
    gathered: bool

    @property
    def programs(self) -> Sequence[Program]:
        """The Programs of a step, in their order."""
        first, *others = self.segments
        return first, self.early_gathers, *others, self.rest


def cluster_shards(body: Program, layer: ResidentLayer, blocks: int) -> ClusterShards | None:
    """How a cluster of `blocks` blocks divides a member's Program; None if it cannot."""
    own = (layer.gather, layer.forward, layer.backward)
    equations = [x for e in body.equations if e not in own for x in single_equations(e)]
    if not all(map(_has_rule, equations)):
        return None
    axes = _axes_of_units(body, layer)
    if blocks == 1 or axes is None or not all(_is_local(e, axes) or _adds_units(e, axes) for e in equations):
        axes = {}
    return _Divider(body, layer, blocks, equations, axes).divided()


def _axes_of_units(body: Program, layer: ResidentLayer) -> Mapping[Variable, int] | None:
    """The axis of units of each value that has one. None if a value has two."""
    equations = (x for e in body.equations if e is not layer.gather for x in single_equations(e))
    states = (((before, i), (after, i)) for before, after in carried(body).items() for i in range(before.type.ndim))
    first = layer.states[0][0], 0
    found = next((axes for axes in joined((*related_axes(equations), *states)) if first in axes), {first})
    axes = dict(found)
    return axes if len(axes) == len(found) else None


def _unit_labels(equation: Equation, axes: Mapping[Variable, int]) -> set[str]:
    """The labels of the axis of units in an equation."""
    values = zip((*equation.inputs, *equation.outputs), (*equation.axes.arguments, *equation.axes.results), strict=True)
    return {labels[axes[v]] for v, labels in values if v in axes}


def _is_local(equation: Equation, axes: Mapping[Variable, int]) -> bool:
    """Whether a block that has its part of the inputs can compute its part of the outputs."""
    e, labels = equation, _unit_labels(equation, axes)
    if not labels or elementwise(e):
        return True
    divided = e.has(Trait.MATMUL) or e.has(Trait.REDUCTION) or e.has(Trait.RESHAPE)
    return divided and len(labels) == 1 and "" not in labels and all(labels <= set(x) for x in e.axes.results)


def _adds_units(equation: Equation, axes: Mapping[Variable, int]) -> bool:
    """Whether the sum of what all blocks compute is the result."""
    labels = _unit_labels(equation, axes)
    sums = equation.has(Trait.MATMUL) or equation.has(Trait.REDUCTION)
    return sums and len(labels) == 1 and labels <= equation.axes.added


def _has_rule(equation: Equation) -> bool:
    """Whether a thread block can compute an equation."""
    e = equation
    if e.has(Trait.MATMUL):
        if len(e.inputs[0].type.shape) != 2 or e.params["precision"] != FULL:
            return False
        return not (e.params["transpose_a"] and e.params["transpose_b"])
    return e.has(Trait.RESHAPE) or elementwise(e) or e.primitive.name in IN_BLOCK


def _ancestors(equations: Sequence[Equation], last: Sequence[Equation]) -> set[Equation]:
    """The equations `last`, and all that they need."""
    producer = {v: e for e in equations for v in e.outputs}
    found, waiting = set(last), list(last)
    while waiting:
        more = {producer[v] for v in waiting.pop().inputs if v in producer} - found
        found |= more
        waiting += more
    return found


class _Divider:
    """Divides the equations into segments.

    Attributes:
        segment: the number of each equation's segment. Views are in all segments that read them.
        ready: the first segment that may read a value. Inputs are not in it.
    """

    def __init__(
        self,
        body: Program,
        layer: ResidentLayer,
        blocks: int,
        equations: Sequence[Equation],
        axes: Mapping[Variable, int],
    ) -> None:
        self.body, self.layer, self.blocks, self.equations, self.axes = body, layer, blocks, equations, axes
        self.of_block: dict[Variable, Variable] = {}
        self.partial: dict[Variable, Sequence[Variable]] = {}
        self.views = {e.outputs[0]: e for e in equations if e.has(Trait.RESHAPE)}
        self.segment: dict[Equation, int] = {}
        self.ready: dict[Variable, int] = {}

    def divided(self) -> ClusterShards | None:
        """The shards; None if nothing is exchanged, or the first segment cannot compute the next batch's number."""
        sums = [e for e in self.equations if _adds_units(e, self.axes)]
        next_number = [e for e in self.equations if self.layer.batch_number[1] in e.outputs]
        needed = {self._source(matmul_of(self.layer.backward).inputs[0])}
        critical = _ancestors(self.equations, [e for e in self.equations if not needed.isdisjoint(e.outputs)])

        # Blocks wait for `early` in all segments but the last. Others make no chain longer there.
        early = _ancestors(self.equations, [*sums, *next_number])
        earliest = self._earliest(sums, {})
        last = max((segment + (e in sums) for e, (segment, _) in earliest.items()), default=0)
        most = dict.fromkeys(range(last), 0)  # the maximum depth of these in each segment
        for e, (segment, depth) in earliest.items():
            if e in early and segment < last:
                most[segment] = max(most[segment], depth)
        earliest = self._earliest(sums, {e: most for e in self.equations if e not in early})
        makes_inputs = any(v in self.ready for v in map(self._source, self.layer.forward.inputs))
        if not last or makes_inputs or not next_number or earliest[next_number[0]][0]:
            return None

        # The last segment has what the gradient of the outputs needs, and rows that are computed with these.
        beside = self._rows_beside(critical, [e for e, (segment, _) in earliest.items() if segment == last])
        segments = {e: segment + (segment == last and e not in beside) for e, (segment, _) in earliest.items()}
        latest = {
            e: last if e in beside else last + 1
            for e in self.equations
            if e not in early and elementwise(e) and e.outputs[0].size > 1
        }
        for e, segment in self._with_readers(segments, latest).items():
            if e in sums:
                self._add(e, segment)
            elif not e.has(Trait.RESHAPE):
                self.segment[self._own(e)] = segment
        first, second, *others = ([e for e, n in self.segment.items() if n == i] for i in range(last + 2))
        gathers = self._early_gathers(second)
        second = [e for e in second if e not in gathers]
        start, early_gathers, *later, rest = self._programs([first, gathers, second, *others])
        parts = (start, *later), early_gathers, rest
        return ClusterShards(self.axes, self.of_block, *parts, self.partial, not self.axes)

    def _early_gathers(self, second: Sequence[Equation]) -> Sequence[Equation]:
        """The gathers of the second segment that need neither other equations of it nor what blocks exchange."""
        late = {v for e in second for v in e.outputs}
        late.update(*self.partial.values(), () if self.axes else self.layer.forward.outputs)
        late.update(y for y in self.views if self._source(y) in late)
        return [e for e in second if e.has(Trait.GATHER) and late.isdisjoint(e.inputs)]

    def _earliest(
        self, sums: Collection[Equation], most: Mapping[Equation, Mapping[int, int]]
    ) -> dict[Equation, tuple[int, int]]:
        """For each equation the first segment that can have it, and its depth there: how many equations of the segment
        must run before it, one after another. Sets `ready`.

        Args:
            sums: the equations of partial sums.
            most: the maximum depth of equations in a segment. One that would be deeper is in the next segment.
        """
        ready: dict[Variable, tuple[int, int]] = dict.fromkeys(self.layer.forward.outputs, (0 if self.axes else 1, 0))
        found = {}
        for e in self.equations:
            segment, depth = max((ready[v] for v in e.inputs if v in ready), default=(0, 0))
            if depth > most.get(e, {}).get(segment, depth):
                segment, depth = segment + 1, 0
            found[e] = segment, depth
            alone = e.has(Trait.RESHAPE) or (elementwise(e) and e.outputs[0].size == 1)  # loops join single numbers
            after = (segment + 1, 0) if e in sums else (segment, depth + (not alone))
            ready |= dict.fromkeys(e.outputs, after)
        self.ready = {v: segment for v, (segment, _) in ready.items()}
        return found

    @staticmethod
    def _rows_beside(critical: Collection[Equation], last: Sequence[Equation]) -> Collection[Equation]:
        """The critical equations of the last segment, and others by row that need no more than critical ones by row."""
        made = {v: e for e in last for v in e.outputs}
        rows: set[Equation] = set()
        for e in last:
            by_row = e.has(Trait.GATHER) or rowwise(e) is not None
            if by_row and all(made[v] in rows for v in e.inputs if v in made):
                rows.add(e)
        return rows.union(e for e in last if e in critical)

    @staticmethod
    def _with_readers(segments: dict[Equation, int], latest: Mapping[Equation, int]) -> dict[Equation, int]:
        """The segment of each equation. Elementwise equations move to the first segment that reads their results, where
        loops join them with the readers.

        Args:
            latest: the last segment that may have each equation that can move.
        """
        found = dict(segments)
        read: dict[Variable, int] = {}
        for e in reversed(segments):
            readers = [read[v] for v in e.outputs if v in read]
            if readers and (e in latest or e.has(Trait.RESHAPE)):
                found[e] = max(found[e], min(*readers, latest.get(e, readers[0])))
            read |= {v: min(found[e], read.get(v, found[e])) for v in e.inputs}
        return found

    def _add(self, equation: Equation, segment: int) -> None:
        """Add a block's partial sum to a segment. The next segment adds the partial sums of all blocks."""
        own = self._own(equation)
        (y,) = own.outputs
        partial, *of_blocks = (y.like() for _ in range(self.blocks + 1))
        self.partial[partial] = of_blocks
        self.segment[replace(own, outputs=(partial,))] = segment
        total = of_blocks[0]
        for part in of_blocks[1:]:
            after = y if part is of_blocks[-1] else y.like()
            e = Equation(PRIMITIVES["add"], (total, part), {}, (after,), equation.scope, equation.phase)
            self.segment[e] = segment + 1
            total = after

    def _programs(self, groups: Sequence[Sequence[Equation]]) -> Sequence[Program]:
        """The Programs of groups of equations that run one after another."""
        members = [self._with_views(group) for group in groups]
        read = [arguments_of(own) for own in members]
        needed = {*self.body.outputs, *self.partial, *map(self._source, self.layer.backward.inputs)}
        needed = {self._part(v) for v in needed}.union(*read)
        found = []
        for own, inputs in zip(members, read, strict=True):
            outputs = tuple(v for e in own if not e.has(Trait.RESHAPE) for v in e.outputs if v in needed)
            found.append(fuse_loops(Program(inputs, {}, tuple(own), outputs)))
        return found

    def _with_views(self, equations: Sequence[Equation]) -> Sequence[Equation]:
        """The equations, each after the views that it reads."""
        of_part = {self._part(v): e for v, e in self.views.items()}
        found: dict[Equation, None] = {}
        done: set[Variable] = set()

        def view(v: Variable) -> None:
            if v in of_part and v not in done:
                done.add(v)
                own = self._own(of_part[v])
                view(own.inputs[0])
                found[own] = None

        for e in equations:
            for v in e.inputs:
                view(v)
            found[e] = None
        return list(found)

    def _source(self, v: Variable) -> Variable:
        while v in self.views:
            v = self.views[v].inputs[0]
        return v

    def _part(self, v: Variable) -> Variable:
        """The part of a value that a block has."""
        if v not in self.axes:
            return v
        if v not in self.of_block:
            shape = list(v.type.shape)
            shape[self.axes[v]] //= self.blocks
            self.of_block[v] = v.like(ArrayType(tuple(shape), v.type.dtype))
        return self.of_block[v]

    def _own(self, equation: Equation) -> Equation:
        """The equation of one block."""
        inputs, outputs = (tuple(map(self._part, group)) for group in (equation.inputs, equation.outputs))
        return replace(equation, inputs=inputs, outputs=outputs)


def updated_arrays(update: Equation) -> Sequence[Variable]:
    """The arrays that an update reads besides the gradient: a `product` equation with such an epilogue."""
    (gradient,) = matmul_of(update).outputs
    return [v for v in epilogue(update).inputs if v.type.shape == gradient.type.shape]


def update_arguments(update: Equation) -> Sequence[Variable]:
    """The single numbers that an update reads, such as the learning rate."""
    arrays = updated_arrays(update)
    return [v for v in epilogue(update).inputs if v not in arrays]


def update_struct(update: Equation, before: Sequence[Variable], after: Sequence[Variable]) -> Iterator[str]:
    """A struct `Update` that updates a number of each array, given the gradient. It holds the `update_arguments`.

    Args:
        before, after: the arrays, in the order of the numbers.
    """
    numbers = update_arguments(update)
    product, *others = flat(body_of(update)).equations
    values = {product.outputs[0]: "gradient"} | {v: f"a{i}" for i, v in enumerate(numbers)}
    values |= {v: f"state[{i}]" for i, v in enumerate(before)}
    program = Program(tuple(values), {}, tuple(others), tuple(after))
    yield "struct Update {"
    yield from (f"    {c_type(v.type.dtype)} a{i};" for i, v in enumerate(numbers))
    yield f"    __device__ __forceinline__ void operator()(float gradient, float (&state)[{len(before)}]) const {{"
    yield from indented(indented(list(statements(program, values, [f"const float new{i}" for i in range(len(after))]))))
    yield from (f"        state[{i}] = new{i};" for i in range(len(after)))
    yield "    }"
    yield "};"


def input_function(gather: Equation) -> Iterator[str]:
    """A function `input_of_byte` from a byte of the table, and the single numbers, to an input of the layer."""
    program, numbers = input_of_byte(gather)
    values = {program.inputs[0]: "byte"} | {v: f"a{i}" for i, v in enumerate(numbers)}
    parameters = ["uint8_t byte", *(f"{c_type(v.type.dtype)} a{i}" for i, v in enumerate(numbers))]
    yield f"static __device__ float input_of_byte({', '.join(parameters)})"
    yield "{"
    yield from indented(statements(program, values, ["const float found"]))
    yield "    return found;"
    yield "}"
