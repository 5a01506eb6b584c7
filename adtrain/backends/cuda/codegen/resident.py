"""Resident steps in a block: where their values lie, in shared memory or in scratch memory, and how their equations are
computed.

While the layer does not use its workspace (`gemm/resident_layer.cuh`), other values lie there. The gradient of the
outputs lies at its end. The layer writes the terms of this gradient to the same memory while the block computes other
equations.

Values that a step replaces, such as the weights of the other layers, have two places: one that this step reads, and one
that the next step reads. An elementwise equation may write the new value over the old one, if nothing else reads it.

A thread block computes an equation as in one-block kernels, but with other products and rows. Equations that work row
by row are fused, and the lanes of a row hold it in registers. A product is fused with the elementwise equation that
reads it, if the same thread has an element in both. So no barriers separate them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from adtrain.backends.cuda.codegen.block_rules import REDUCTIONS, matmul, overlapped_take, reduction, rule_of
from adtrain.backends.cuda.codegen.part import Names, Step, StepRule, aligned_to_vector, lanes_for
from adtrain.backends.cuda.codegen.register_rows import rows_in_block, takes_numbers
from adtrain.backends.cuda.forms.resident_layer import THREADS, ClusterShards, ResidentLayer, carried
from adtrain.backends.cuda.forms.row_fused import ROW_FUSED, RowFusion, rowwise
from adtrain.codegen.elementwise import c_type
from adtrain.core.axes import Items
from adtrain.core.kernel import WARP
from adtrain.core.primitive import Trait
from adtrain.core.program import PRODUCT, Equation, Program, Variable, body_of
from adtrain.passes.fusion import EpilogueFusion, FusionPass, by_element

ALIGNMENT = 16
MIN_SHARED = 5 << 10
"""Bytes of shared memory for the values between the equations of a segment."""


class ResidentPlaces:
    """The places of a block's values.

    Attributes:
        carried: from each value that a step replaces to its value in the next step. The layer's are not among them.
        copied: the inputs that a block copies: carried ones, sharded ones and single numbers.
        replaced: the carried values that the step replaces in the same memory.
        swapped: the memories of the other carried values. For each its name, where it begins, and its bytes for a step.
        names: where each value of a block lies in a step, as C text.
        in_shared: the values in shared memory.
        workspace: bytes of shared memory in front of the resident values.
        shared_bytes: those at its beginning that are left to the equations of a segment.
        exchanged_bytes: of scratch memory, for values that blocks exchange.
        received: the byte of shared memory where an mbarrier lies, and ALIGNMENT bytes after it the partial sums of all
            blocks. None if there is no room: then these sums lie in scratch memory too.
        received_bytes: of the partial sums of a block.
        scratch_bytes: of scratch memory of a block.
    """

    def __init__(
        self,
        body: Program,
        layer: ResidentLayer,
        blocks: int,
        shards: ClusterShards,
        shared: int,
        update_arguments: Sequence[Variable],
        pointers: Mapping[Variable, str],
    ) -> None:
        self.body, self.layer, self.blocks, self.shards = body, layer, blocks, shards
        self.update_arguments = update_arguments
        resident = {v for pair in layer.states for v in pair}
        self.carried = {before: after for before, after in carried(body).items() if before not in resident}
        read = {v for program in shards.programs for v in program.inputs}
        kept = {v for v in body.inputs if v in shards.axes or (v.size == 1 and v in read)} - resident
        self.copied = [v for v in body.inputs if v in self.carried or v in kept]
        self.replaced = {v for v in self.carried if self._in_place(v)}
        self.names = {v: pointers[v] for v in body.inputs if v not in self.copied}
        self.workspace = (shared - layer.shared_bytes(blocks)[0]) // ALIGNMENT * ALIGNMENT
        self.swapped: list[tuple[str, str, int]] = []
        self.in_shared: set[Variable] = set()
        self.received: int | None = None
        self.received_bytes = sum(aligned_to_vector(sums.nbytes) for sums in shards.partial)
        # Values lie in shared memory from `_top` down to the workspace of the layer, and in this from `_below` down.
        self._top, self.scratch_bytes = self.workspace, 0
        self._layer_workspace = layer.shared_bytes(blocks)[1]
        self._below = self._layer_workspace - layer.operand_bytes(blocks)
        self._place_copied()
        self._place_exchanged()
        self._place_made()
        self.shared_bytes = self._below

    def name(self, v: Variable) -> str:
        """C text: where the part of a value lies that a block has."""
        return self.names[self._part(self.body.before_reshapes(v))]

    def _part(self, v: Variable) -> Variable:
        return self.shards.of_block.get(v, v)

    def _place_copied(self) -> None:
        """Place the copied values and the values that replace them, in memory that the layer never uses."""
        here: list[Variable] = []
        there: list[Variable] = []
        for v in sorted(self.copied, key=lambda v: self._part(v).nbytes):
            size = aligned_to_vector(self._part(v).nbytes) * self._places(v)
            fits = self._top - size >= max(self._layer_workspace, MIN_SHARED)
            self._top -= size if fits else 0
            (here if fits else there).append(v)
        for memory, begin, group in (("shared", f"shared_bytes + {self._top}", here), ("own", "scratch", there)):
            step = sum(aligned_to_vector(self._part(v).nbytes) for v in group if self._places(v) == 2)
            at, end = 0, 2 * step
            for v in group:
                old, new = self._part(v), self._part(self.carried.get(v, v))
                if self._places(v) == 1:
                    self.names |= dict.fromkeys((old, new), _cast(old, f"{begin} + {end}"))
                    end += aligned_to_vector(old.nbytes)
                else:
                    self.names |= {old: _cast(old, f"this_{memory} + {at}"), new: _cast(new, f"next_{memory} + {at}")}
                    at += aligned_to_vector(old.nbytes)
                if group is here:
                    self.in_shared |= {old, new}
            self.swapped.append((memory, begin, step))
            self.scratch_bytes = end  # of the last group

    def _place_exchanged(self) -> None:
        """Give each value that blocks exchange its place."""
        size = ALIGNMENT + self.blocks * self.received_bytes
        at, start = 0, "exchanged"
        one_exchange = len(self.shards.partial) == 1 and len(self.shards.segments) == 2
        if one_exchange and self._top - size >= self._layer_workspace:
            self._top -= size
            self.received, start = self._top, f"shared_bytes + {self._top + ALIGNMENT}"
        for sums, of_blocks in self.shards.partial.items():
            self.names |= {v: _cast(v, f"{start} + {at + i * self.received_bytes}") for i, v in enumerate(of_blocks)}
            self.names[sums] = _cast(sums, f"{start} + {at} + cluster_rank() * {self.received_bytes}")
            at += aligned_to_vector(sums.nbytes)
            if self.received is not None:
                self.in_shared |= {sums, *of_blocks}
        at *= self.blocks
        for v in self.layer.forward.outputs if self.shards.gathered else ():
            self.names[v] = _cast(v, f"{start} + {at}")
            at += aligned_to_vector(v.nbytes)
        self.exchanged_bytes = at if self.received is None else 0

    def _place_shared_in_turn(self, outputs: Sequence[Variable], gradient: Variable) -> None:
        """Put the outputs of the layer, and their gradient, where other values lie later or before.

        The layer writes the terms of the gradient to its workspace in the second phase after the last segment. When the
        gradient is computed, nothing reads the partial sums of all blocks.
        """
        spaces = {"terms": (self._below, self._layer_workspace - self._below)}
        if self.received is not None:
            spaces["sums"] = (self.received + ALIGNMENT, self.blocks * self.received_bytes)
        for v, usable in ((gradient, ("sums", "terms")), *((v, ("terms",)) for v in outputs)):
            fits = [name for name in usable if name in spaces and v.nbytes <= spaces[name][1]]
            if fits and v not in self.names and self._read_first(v):
                self.names[v] = _cast(v, f"shared_bytes + {spaces.pop(fits[0])[0]}")
                self.in_shared.add(v)

    def _place_made(self) -> None:
        """Give each other value its place: in shared memory while there is room, otherwise in scratch memory."""
        outputs = [self._part(v) for v in self.layer.forward.outputs]
        gradient = self._part(self.body.before_reshapes(gradient_of(self.layer)))
        self._place_shared_in_turn(outputs, gradient)
        made = [v for program in self.shards.programs for v in program.outputs]
        for v in dict.fromkeys((*outputs, gradient, *sorted(made, key=lambda v: v.nbytes))):
            if v in self.names:
                continue
            size = aligned_to_vector(v.nbytes)
            if self._top - size >= self._layer_workspace:
                self._top -= size
                place = f"shared_bytes + {self._top}"
                self.in_shared.add(v)
            elif self._below - size >= MIN_SHARED:
                self._below -= size
                place = f"shared_bytes + {self._below}"
                self.in_shared.add(v)
            else:
                place = f"scratch + {self.scratch_bytes}"
                self.scratch_bytes += size
            self.names[v] = _cast(v, place)

    def _read_first(self, v: Variable) -> bool:
        """Whether the equations after the last segment read a value only in their first phase."""
        rest, views = self.shards.rest, {v}
        for e in rest.equations:
            if e.has(Trait.RESHAPE) and e.inputs[0] in views:
                views.add(e.outputs[0])
        made = {x for e in rest.equations for x in e.outputs} - views
        readers = [e for e in rest.equations if not e.has(Trait.RESHAPE) and not views.isdisjoint(e.inputs)]
        return all(made.isdisjoint(e.inputs) for e in readers)

    def _places(self, v: Variable) -> int:
        """In how many places an input of the kernel lies that a block copies."""
        return 2 if v in self.carried and v not in self.replaced else 1

    def _in_place(self, before: Variable) -> bool:
        """Whether the equation that replaces a carried value may write the new one to the same memory."""
        old, new = self._part(before), self._part(self.carried[before])
        programs = self.shards.programs
        at = next(i for i, program in enumerate(programs) if new in program.outputs)
        (e,) = (e for e in programs[at].equations if new in e.outputs)
        later = any(old in program.inputs for program in programs[at + 1 :])
        alone = [*programs[at].readers.get(old, [])] in ([], [e])
        return (
            by_element(e)
            and alone
            and not later
            and before not in map(self.body.before_reshapes, self.update_arguments)
        )

    def values_in_outputs(self, segment: Program) -> dict[Variable, Variable]:
        """The values that an elementwise equation may replace by an output in the same memory, and these outputs."""
        made = {v for e in segment.equations if not e.has(Trait.RESHAPE) for v in e.outputs} - {*segment.outputs}
        kept = {self._part(self.carried[v]) for v in self.replaced}  # the old value is still needed
        found: dict[Variable, Variable] = {}
        for e in filter(by_element, segment.equations):
            old = [v for v in e.inputs if v in made and len(segment.readers[v]) == 1]
            for y in (v for v in e.outputs if v in segment.outputs and v not in kept):
                v = next((v for v in old if v.type == y.type and v not in found), None)
                found |= {v: y} if v else {}
        return found


def gradient_of(layer: ResidentLayer) -> Variable:
    """The gradient of the outputs of the layer."""
    return body_of(layer.backward).equations[0].inputs[0]


def _cast(v: Variable, place: str) -> str:
    return f"(({c_type(v.type.dtype)} *)({place}))"


BESIDE = 8
"""Vectors of columns that a warp reduces side by side."""
MAX_NARROW, MAX_SHORT_K = 16, 16
"""A product with no more columns, rows or K is computed without tensor cores."""
TALL = 2
"""Rows of the tile of a lane, in a product whose left operand is transposed."""
VECTOR, TILE = 4, 16
"""Elements of a vector. Rows and columns of the tile of a warp (`WarpTile` in `gemm/resident_layer.cuh`)."""


class _RowsInBlock(RowFusion):
    """Row-wise equations without products, which a thread block computes for all rows."""

    form = ROW_FUSED

    def row_wise(self) -> list[Items | None]:
        return [_by_row(e) for e in self.program.equations]


class _ShortProducts(EpilogueFusion):
    """The products whose epilogue runs on the registers of the threads that computed them."""

    form = PRODUCT

    def takes(self, product: Equation, epilogue: Equation) -> bool:
        return _is_short(product, THREADS)


def fused(segment: Program) -> Program:
    """The equations of a segment, with rows and products fused."""
    rows = FusionPass((_RowsInBlock,))(segment)
    equations = [x for e in rows.equations for x in _unless_rows(e)]
    return FusionPass((_ShortProducts,))(replace(rows, equations=tuple(equations)))


def _by_row(equation: Equation) -> Items | None:
    """How it works row by row; None if it does not."""
    return equation.items if takes_numbers(equation) else rowwise(equation)


def _unless_rows(equation: Equation) -> Sequence[Equation]:
    """The equation. If it fuses rows that do not fit in registers: the equations in it."""
    if equation.form != ROW_FUSED:
        return (equation,)
    body = body_of(equation)
    names = dict.fromkeys((*body.inputs, *body.outputs), "")
    return (equation,) if rows_in_block(body, names, THREADS) else body.equations


def resident_rule(equation: Equation) -> StepRule:
    """How a block computes an equation."""
    if equation.form == ROW_FUSED:
        return _rows
    if equation.form == PRODUCT:
        return _product
    if equation.primitive.name in REDUCTIONS:
        return partial(reduction, op=REDUCTIONS[equation.primitive.name], by_columns=_in_warps)
    if not equation.has(Trait.MATMUL):
        return overlapped_take if equation.has(Trait.GATHER) else rule_of(equation)
    m, n = equation.outputs[0].type.shape
    if min(m, n) > MAX_NARROW and _length_k(equation) > MAX_SHORT_K:
        return _warp_products
    if equation.params["transpose_a"] and min(m, n) >= VECTOR:
        return _transposed_product
    narrow = equation.params["transpose_b"] and not equation.params["transpose_a"] and n <= MAX_NARROW
    return _narrow_product if narrow else _matmul


def _matmul(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    return matmul(equation, names, threads, _in_warps)


def _in_warps(
    op: str, y: Variable, count: int, slices: int, wide: int, read: str, names: Names, threads: int
) -> Sequence[Step]:
    """A reduction of columns by the lanes of a warp. It writes no partial results, so it needs no barrier."""
    columns, a = y.size // wide, c_type(y.type.dtype)
    beside = max(min(1 << (columns - 1).bit_length(), BESIDE), WARP >> (count.bit_length() - 1))
    lines = [
        f"in_block::reduce_columns<{op}, {a}, THREADS, {y.size}, {count}, {WARP // beside}, {wide}>(t,",
        f"    [&](int o, int r) {{ {read} }},",
        f"    [&](int o, {a} value) {{ {names[y]}[o] = value; }});",
    ]
    return [Step(lines, min(-(-columns // beside) * WARP, threads))]


def _rows(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    step = rows_in_block(body_of(equation), names, threads)
    assert step is not None, "rows without a rule are not fused"
    return [step]


def _is_short(equation: Equation, threads: int) -> bool:
    """Whether it is a product of short K in which thread t computes elements t, t + threads, ..., as in a loop."""
    if not equation.has(Trait.MATMUL) or equation.params["transpose_a"] or _length_k(equation) > MAX_SHORT_K:
        return False
    n = equation.outputs[0].type.shape[1]
    return threads % n == 0 and threads >= 2 * n and resident_rule(equation) is _matmul


def _product(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    """A product and the elementwise equation that reads it. The product is stored where the result will be."""
    product, reader = body_of(equation).equations
    names = {product.outputs[0]: names[reader.outputs[0]], **names}
    (first,), (last,) = (resident_rule(e)(e, names, threads) for e in (product, reader))
    return [Step([*first.lines, *last.lines], first.threads)]


def _length_k(equation: Equation) -> int:
    return equation.inputs[0].size // equation.outputs[0].type.shape[0]


def _narrow_product(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    """A product of few columns by a transposed matrix. Lanes that share a row keep it in registers for all columns."""
    (a, b), (y,) = equation.inputs, equation.outputs
    (m, n), k = y.type.shape, a.type.shape[1]
    wide = math.gcd(16 // y.type.dtype.itemsize, k)
    lanes = math.gcd(lanes_for(k // wide, m, threads), k // wide)
    numbers = f"{c_type(y.type.dtype)}, THREADS, {m}, {n}, {k}, {lanes}, {wide}"
    line = f"in_block::narrow_products<{numbers}>(t, {', '.join(names[v] for v in (a, b, y))});"
    return [Step([line], min(m * lanes, threads))]


def _transposed_product(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    """A small product whose left operand is transposed. Each lane of a warp computes a tile of outputs."""
    (a, b), (y,) = equation.inputs, equation.outputs
    (m, n), k = y.type.shape, a.type.shape[0]
    tall, wide = math.gcd(TALL, m), math.gcd(16 // y.type.dtype.itemsize, n)
    lanes = math.gcd(WARP // BESIDE, k)
    numbers = f"{c_type(y.type.dtype)}, THREADS, {m}, {n}, {k}, {lanes}, {tall}, {wide}"
    line = f"in_block::transposed_products<{numbers}>(t, {', '.join(names[v] for v in (a, b, y))});"
    return [Step([line], min(-(-y.size // (tall * wide * WARP // lanes)) * WARP, threads))]


def _warp_products(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    """A product on tensor cores."""
    (a, b), (y,) = equation.inputs, equation.outputs
    (m, n), k = y.type.shape, _length_k(equation)
    transpose_a, transpose_b = bool(equation.params["transpose_a"]), bool(equation.params["transpose_b"])
    flags = ", ".join(str(flag).lower() for flag in (transpose_a, transpose_b))
    wide_a, wide_b = (math.gcd(VECTOR, length) for length in (m if transpose_a else k, k if transpose_b else n))
    pointers = ", ".join(names[v] for v in (a, b, y))
    line = f"warp_products<THREADS, {flags}, {wide_a}, {wide_b}>(t, {pointers}, {m}, {n}, {k});"
    return [Step([line], min(-(-m // TILE) * -(-n // TILE) * WARP, threads))]
