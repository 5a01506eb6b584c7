"""The kernel of a `resident_steps` equation: several steps of a member by a cluster of thread blocks.

The products of the first layer are in `kernels/cuda/gemm/resident_layer.cuh`. The other equations run in supersteps,
with a barrier of the cluster between two of them. Their values lie in scratch memory. Values that a step replaces, such
as the weights of the other layers, have two places there: one that this step reads, and one that the next step reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from adtrain.backends.cuda.codegen.horizontal import parts_of
from adtrain.backends.cuda.codegen.loops import flat
from adtrain.backends.cuda.codegen.one_block import part_of
from adtrain.backends.cuda.codegen.part import FIRST_STATEMENT, OPTIONS, Kernel, Part, aligned, dispatch, indented
from adtrain.backends.cuda.codegen.product import Epilogue, epilogue
from adtrain.backends.cuda.codegen.row_fused import own_rows
from adtrain.backends.cuda.compiler import Source
from adtrain.codegen.elementwise import statements
from adtrain.codegen.expressions import c_type, pointer
from adtrain.core.fused import body_of, row_fused_p
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.target import Target
from adtrain.lowering.cuda.gemm.matmul import BlockGemm
from adtrain.lowering.cuda.gemm.tiles import SmallTile
from adtrain.passes.fuse_horizontally import is_product
from adtrain.passes.fuse_rows import shared_inputs
from adtrain.passes.places import nbytes
from adtrain.passes.resident_layer import (
    PART_SHARED,
    PARTIAL_SUMS,
    THREADS,
    TILE,
    WARPS,
    ResidentLayer,
    carried,
    input_of_byte,
    resident_layer,
    supersteps,
    table_gathers,
)

Choice = Callable[[Equation], Sequence[BlockGemm]]
"""The GEMM functions for a matrix product, the best first."""

PACKED_BATCHES = 3
"""Packed batches in scratch memory: one for the forward product, two for the gradients of this and the next step."""
HEADER = "gemm/resident_layer.cuh"


def resident_steps(equation: Equation, choose: Choice, target: Target) -> Kernel:
    """The kernel of one member."""
    body = body_of(equation)
    layer = resident_layer(body)
    assert layer is not None, "the pass that made the equation has found the layer"
    blocks = layer.blocks(target.shared)
    assert blocks is not None, "the pass has found that the layer fits"
    return _Writer(body, layer, blocks, choose, target).kernel()


class _Writer:
    """Writes the kernel.

    Attributes:
        block_units: units of the layer that a block has.
        superstep: the number of each equation's superstep.
        parts: of each superstep.
        resident: the weights and their optimizer state, before and after the step.
        carried: the other values that a step replaces; for each the value in the next step.
        pointers: the kernel's arguments, as C text.
        names: where each value lies in a step, as C text.
        packed: the byte of the scratch memory where packed batches start.
        part_scratch: for each superstep, the byte where the scratch memory of its parts starts.
    """

    def __init__(self, body: Program, layer: ResidentLayer, blocks: int, choose: Choice, target: Target) -> None:
        self.body, self.layer, self.blocks = body, layer, blocks
        self.batch, self.inputs, self.units = layer.lengths
        self.block_units = self.units // blocks
        self.superstep = supersteps(body, layer)
        self.parts = [self._parts(i, choose, target) for i in range(self.superstep[layer.backward] + 1)]
        examples, indices = table_gathers(layer.gather)
        self.table, self.indices = examples.inputs[0], indices.inputs[0]
        self.forward = epilogue(layer.forward, "Forward")
        self.resident = {v for pair in layer.states for v in pair}
        self.carried = {before: after for before, after in carried(body).items() if before not in self.resident}
        self.operands = [*body.inputs, *body.outputs]
        self.pointers = {v: f"p{i}" for i, v in enumerate(self.operands)}
        self.carried_bytes = sum(aligned(nbytes(v)) for v in self.carried)
        self.names: dict[Variable, str] = {}
        self.part_scratch: list[int] = []
        self.packed = self.scratch = 0
        self._place()

    def _parts(self, number: int, choose: Choice, target: Target) -> list[Part]:
        """The parts of a superstep. The products of the layer are not among them."""
        members = [e for e, found in self.superstep.items() if found == number]
        members = [e for e in members if e not in (self.layer.forward, self.layer.backward)]
        rows = [e for e in members if e.primitive is row_fused_p]
        others = [e for e in members if e not in rows]
        products = {e: _without_shared_memory(choose(e)[0]) for e in others if is_product(e)}
        return [*map(self._rows, rows), *parts_of(others, products, THREADS, target, f"Epilogue{number}_", PART_SHARED)]

    def _rows(self, equation: Equation) -> Part:
        """The part of a `row_fused` equation, with equally many rows for each block, and at most as many blocks as the
        cluster has."""
        body = body_of(equation)
        count = body.outputs[0].type.shape[0]
        rows = next(n for n in range(-(-count // self.blocks), count + 1) if count % n == 0)
        return own_rows(
            body, {count: rows}, shared_inputs(body), lambda own, names: part_of(own, names, THREADS, PART_SHARED)
        )

    def _place(self) -> None:
        """Give each value its place in memory."""
        self.names = {v: self.pointers[v] for v in self.body.inputs}
        at = 0
        for before, after in self.carried.items():
            self.names |= {before: _cast(before, f"this_step + {at}"), after: _cast(after, f"next_step + {at}")}
            at += aligned(nbytes(before))
        at = 2 * self.carried_bytes
        for e in self.body.equations:
            for v in e.outputs:
                if e.has(Trait.RESHAPE):
                    self.names[v] = self.names.get(e.inputs[0], "")
                elif v not in self.names and v not in self.resident and e is not self.layer.gather:
                    self.names[v] = _cast(v, f"scratch + {at}")
                    at += aligned(nbytes(v))
        self.packed = at
        at += PACKED_BATCHES * self.batch * self.inputs * 2
        for parts in self.parts:
            self.part_scratch.append(at)
            at += sum(aligned(part.scratch) for part in parts)
        self.scratch = at

    def kernel(self) -> Kernel:
        parts = [part for found in self.parts for part in found]
        resident, workspace = self.layer.shared_bytes(self.blocks)
        assert all(part.shared <= workspace for part in parts), "parts have at most PART_SHARED bytes"
        written = set(self.body.outputs)
        parameters = [f"{pointer(v, const=v not in written)}{self.pointers[v]}" for v in self.operands]
        headers = dict.fromkeys(["common/common.cuh", *(h for part in parts for h in part.headers)])
        lengths = f"{self.inputs}, {self.block_units}, {self.batch}, {len(self.layer.states)}, {PARTIAL_SUMS}"
        text = [
            "#define T float",
            *(f'#include "{header}"' for header in headers),
            f"constexpr int THREADS = {THREADS};",
            f'#include "{HEADER}"',
            *dict.fromkeys(part.definitions for part in parts if part.definitions),
            self.forward.text,
            *self._update(),
            *self._input_of_byte(),
            f"typedef ResidentLayer<{lengths}> Layer;",
            f'static_assert(Layer::RESIDENT + Layer::SUMS == {resident}, "as planned");',
            f'static_assert(Layer::WORKSPACE <= {workspace}, "as planned");',
            "",
            "KERNEL CLUSTER_DIMS __launch_bounds__(THREADS) resident_steps(",
            f"    {', '.join(parameters)}, int64_t runs, char *scratch, int *bad)",
            "{",
            f"    {FIRST_STATEMENT}",
            *indented(list(self._statements(workspace))),
            "}",
            "",
        ]
        source = Source("resident_steps.cu", "\n".join(text), (*OPTIONS, f"-DCLUSTER={self.blocks}"))
        size = self.blocks, THREADS, workspace + resident, self.scratch
        return Kernel(source, "resident_steps", self.operands, *size, checked=True, repeats=True)

    def _statements(self, workspace: int) -> Iterator[str]:
        batch_number, _ = self.layer.batch_number
        _, numbers = input_of_byte(self.layer.gather)
        arguments = "".join(f", *{self.pointers[v]}" for v in numbers)
        yield f"char *this_step = scratch, *next_step = scratch + {self.carried_bytes};"
        yield f"const int unit0 = cluster_rank() * {self.block_units};"
        yield f"const float of_0 = input_of_byte(0{arguments}), of_255 = input_of_byte(255{arguments});"
        yield f"const Layer layer(shared_bytes, {workspace}, (of_255 - of_0) / 255, of_0);"
        for i, (before, _) in enumerate(self.layer.states):
            yield f"layer.load({i}, {self.pointers[before]} + unit0 * {self.inputs});"
        for before in self.carried:
            yield f"if (cluster_rank() == 0) copy({self.names[before]}, {self.pointers[before]}, {before.size});"
        yield f"char *const direct = scratch + {self.packed}, *transposed = direct + Layer::PACKED;"
        yield "char *next_transposed = transposed + Layer::PACKED;"
        yield "cluster_barrier();"
        yield f"layer.set_row({self._example(batch_number)}, {self.table.type.shape[0]}, bad);"
        yield "__syncthreads();"
        yield f"layer.pack({self.pointers[self.table]}, direct, transposed);"
        yield "cluster_barrier();"
        yield "layer.forward(direct);"
        yield "#pragma unroll 1"
        yield "for (int64_t run = 0; run < runs; run++) {"
        yield from indented([*self._finish(), *self._supersteps(), *self._backward()])
        yield "}"
        for i, (_, after) in enumerate(self.layer.states):
            yield f"layer.store({i}, {self.pointers[after]} + unit0 * {self.inputs});"
        for before, after in self.carried.items():
            yield f"if (cluster_rank() == 0) copy({self.pointers[after]}, {self.names[before]}, {before.size});"

    def _finish(self) -> Iterator[str]:
        """The outputs of the layer, with the epilogue of its product."""
        pointers = ", ".join(self.names[v] for v in (*self.forward.inputs, *self.forward.outputs))
        yield f"const Forward epilogue = {{{pointers}}};"
        yield f"layer.finish({self.pointers[self.table]}, [&](int row, int unit, const float (&value)[4]) {{"
        yield f"    epilogue(0, row, unit0 + unit, (int64_t)row * {self.units} + unit0 + unit, value);"
        yield "});"
        yield "__syncthreads();"

    def _supersteps(self) -> Iterator[str]:
        """The parts. The superstep after the one that computes the next batch's number also packs the next batch."""
        _, next_batch = self.layer.batch_number
        computed = next(number for e, number in self.superstep.items() if next_batch in e.outputs)
        yield "const bool last = run + 1 == runs;"
        for i, parts in enumerate(self.parts):
            if i:
                yield "cluster_barrier();"
            if i == computed + 1:  # before the parts, so that the load overlaps them
                yield f"const int64_t example = last ? 0 : {self._example(next_batch)};"
            if total := sum(part.blocks for part in parts):
                yield f"for (int number = cluster_rank(); number < {total}; number += CLUSTER) {{"
                yield from indented(list(dispatch(parts, self.names, "number", self.part_scratch[i])))
                yield "    __syncthreads();"
                yield "}"
            if i == computed + 1:
                yield "if (!last) {"
                yield f"    layer.set_row(example, {self.table.type.shape[0]}, bad);"
                yield "    __syncthreads();"
                yield f"    layer.pack({self.pointers[self.table]}, direct, next_transposed);"
                yield "}"

    def _backward(self) -> Iterator[str]:
        """The gradients and updates of the layer's weights, and the product of the new weights and the next batch."""
        gradient = self.names[body_of(self.layer.backward).equations[0].inputs[0]]
        yield f"layer.load_gradient({gradient} + unit0, {self.units});"
        yield "__syncthreads();"
        yield f"const Update update = {{{', '.join(f'*{self.names[v]}' for v in self._update_arguments())}}};"
        yield "if (last)"
        yield "    layer.backward<false>(transposed, direct, update);"
        yield "else"
        yield "    layer.backward<true>(transposed, direct, update);"
        yield "cluster_barrier();"
        for a, b in (("this_step", "next_step"), ("transposed", "next_transposed")):
            yield f"char *const old_{a} = {a};"
            yield f"{a} = {b}, {b} = old_{a};"

    def _example(self, batch_number: Variable) -> str:
        """C text: the example of this thread's row of a batch."""
        batches = self.indices.type.shape[0]
        number = f"(int64_t)*{self.names[batch_number]}"
        return f"layer.example({self.pointers[self.indices]}, {number}, {batches}, bad)"

    def _update_arguments(self) -> Sequence[Variable]:
        """The single numbers that the update reads, such as the learning rate."""
        after: Epilogue = epilogue(self.layer.backward)
        return [v for v in after.inputs if v not in self.resident]

    def _update(self) -> Iterator[str]:
        """A struct that updates a weight and its optimizer state, given the gradient."""
        body = flat(body_of(self.layer.backward))
        (gradient, *_), others = body.equations[0].outputs, body.equations[1:]
        numbers, states = self._update_arguments(), self.layer.states
        values = {gradient: "gradient"} | {v: f"a{i}" for i, v in enumerate(numbers)}
        values |= {before: f"state[{i}]" for i, (before, _) in enumerate(states)}
        program = Program(tuple(values), {}, tuple(others), tuple(after for _, after in states))
        yield "struct Update {"
        yield from (f"    {c_type(v.type.dtype)} a{i};" for i, v in enumerate(numbers))
        yield f"    __device__ __forceinline__ void operator()(float gradient, float (&state)[{len(states)}]) const {{"
        yield from indented(indented(statements(program, values, [f"const float new{i}" for i in range(len(states))])))
        yield from (f"        state[{i}] = new{i};" for i in range(len(states)))
        yield "    }"
        yield "};"

    def _input_of_byte(self) -> Iterator[str]:
        program, numbers = input_of_byte(self.layer.gather)
        values = {program.inputs[0]: "byte"} | {v: f"a{i}" for i, v in enumerate(numbers)}
        parameters = ["uint8_t byte", *(f"{c_type(v.type.dtype)} a{i}" for i, v in enumerate(numbers))]
        yield f"static __device__ float input_of_byte({', '.join(parameters)})"
        yield "{"
        yield from indented(statements(program, values, ["const float found"]))
        yield "    return found;"
        yield "}"


def _cast(v: Variable, place: str) -> str:
    return f"(({c_type(v.type.dtype)} *)({place}))"


def _without_shared_memory(gemm: BlockGemm) -> BlockGemm:
    """The same product by blocks of THREADS threads, which load operands directly to registers."""
    tile = gemm.tile
    assert isinstance(tile, SmallTile), "members multiply float32 by small GEMMs"
    slices = WARPS // (tile.m // TILE * (tile.n // TILE))
    tile = replace(tile, warp_m=TILE, warp_n=TILE, slices=slices).for_k(gemm.lengths[-1])
    return replace(gemm, tile=tile, load_bytes=8)
