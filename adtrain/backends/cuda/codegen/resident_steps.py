"""The kernel of a `resident_steps` equation: several steps of a member by a cluster of thread blocks.

The first layer is `kernels/cuda/gemm/resident_layer.cuh`. The other equations run in supersteps, with a barrier of the
cluster between two of them. Their values lie in scratch memory. What a step replaces lies there twice: as the step
reads it, and as the next one will.
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
    SLOTS,
    THREADS,
    TILE,
    WARPS,
    ResidentLayer,
    carried,
    input_of_byte,
    resident_layer,
    supersteps,
    takes,
)

Choice = Callable[[Equation], Sequence[BlockGemm]]
"""The GEMM functions for a matrix product, the best first."""

PACKED_BATCHES = 3
"""Copies of a batch as float16: for the product with the weights, and for that with the gradient in this step and the
next one."""
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
    """Writes the kernel for a cluster of so many blocks."""

    def __init__(self, body: Program, layer: ResidentLayer, blocks: int, choose: Choice, target: Target) -> None:
        self.body, self.layer, self.blocks = body, layer, blocks
        self.batch, self.inputs, self.units = layer.lengths
        self.own = self.units // blocks
        self.superstep = supersteps(body, layer)
        self.parts = [self._parts(i, choose, target) for i in range(self.superstep[layer.backward] + 1)]
        rows, row = takes(layer.gather)
        self.table, self.order, self.examples = rows.inputs[0], row.inputs[0], rows.inputs[0].type.shape[0]
        self.forward = epilogue(layer.forward, "Forward")
        self.held = {v for pair in layer.states for v in pair}
        self.small = {before: after for before, after in carried(body).items() if before not in self.held}
        self.operands = [*body.inputs, *body.outputs]
        self.pointers = {v: f"p{i}" for i, v in enumerate(self.operands)}
        self.carried_bytes = sum(aligned(nbytes(v)) for v in self.small)
        self.names: dict[Variable, str] = {}
        self.part_scratch: list[int] = []
        self.packed = self.scratch = 0
        self._place()

    def _parts(self, number: int, choose: Choice, target: Target) -> list[Part]:
        """The parts of the equations of a superstep, but not of the products of the layer."""
        members = [e for e, found in self.superstep.items() if found == number]
        members = [e for e in members if e not in (self.layer.forward, self.layer.backward)]
        rows = [e for e in members if e.primitive is row_fused_p]
        others = [e for e in members if e not in rows]
        products = {e: _direct(choose(e)[0]) for e in others if is_product(e)}
        return [*map(self._rows, rows), *parts_of(others, products, THREADS, target, f"Epilogue{number}_", PART_SHARED)]

    def _rows(self, equation: Equation) -> Part:
        """The part of a `row_fused` equation: each block of the cluster has as many rows, if they divide."""
        body = body_of(equation)
        count = body.outputs[0].type.shape[0]
        rows = next(n for n in range(-(-count // self.blocks), count + 1) if count % n == 0)
        return own_rows(
            body, {count: rows}, shared_inputs(body), lambda own, names: part_of(own, names, THREADS, PART_SHARED)
        )

    def _place(self) -> None:
        """Give each value its place: `names` are pointers as C text."""
        self.names = {v: self.pointers[v] for v in self.body.inputs}
        at = 0
        for before, after in self.small.items():
            self.names |= {before: _cast(before, f"now + {at}"), after: _cast(after, f"following + {at}")}
            at += aligned(nbytes(before))
        at = 2 * self.carried_bytes
        for e in self.body.equations:
            for v in e.outputs:
                if e.has(Trait.RESHAPE):
                    self.names[v] = self.names.get(e.inputs[0], "")
                elif v not in self.names and v not in self.held and e is not self.layer.gather:
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
        held, exchange = self.layer.shared_bytes(self.blocks)
        assert all(part.shared <= exchange for part in parts), "parts have at most PART_SHARED bytes"
        written = set(self.body.outputs)
        parameters = [f"{pointer(v, const=v not in written)}{self.pointers[v]}" for v in self.operands]
        headers = dict.fromkeys(["common/common.cuh", *(h for part in parts for h in part.headers)])
        lengths = f"{self.inputs}, {self.own}, {self.batch}, {len(self.layer.states)}, {SLOTS}"
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
            f'static_assert(Layer::HELD + Layer::SMALL == {held} && Layer::EXCHANGE <= {exchange}, "as planned");',
            "",
            "KERNEL CLUSTER_DIMS __launch_bounds__(THREADS) resident_steps(",
            f"    {', '.join(parameters)}, int64_t runs, char *scratch, int *bad)",
            "{",
            f"    {FIRST_STATEMENT}",
            *indented(list(self._statements(exchange))),
            "}",
            "",
        ]
        source = Source("resident_steps.cu", "\n".join(text), (*OPTIONS, f"-DCLUSTER={self.blocks}"))
        numbers = self.blocks, THREADS, exchange + held, self.scratch
        return Kernel(source, "resident_steps", self.operands, *numbers, checked=True, repeats=True)

    def _statements(self, exchange: int) -> Iterator[str]:
        position, _ = self.layer.position
        _, numbers = input_of_byte(self.layer.gather)
        given = "".join(f", *{self.pointers[v]}" for v in numbers)
        yield f"char *now = scratch, *following = scratch + {self.carried_bytes};"
        yield f"const int unit0 = cluster_rank() * {self.own};"
        yield f"const float of_0 = input_of_byte(0{given}), of_255 = input_of_byte(255{given});"
        yield f"const Layer layer(shared_bytes, {exchange}, (of_255 - of_0) / 255, of_0);"
        for i, (before, _) in enumerate(self.layer.states):
            yield f"layer.load({i}, {self.pointers[before]} + unit0 * {self.inputs});"
        for before in self.small:
            yield f"if (cluster_rank() == 0) copy({self.names[before]}, {self.pointers[before]}, {before.size});"
        yield f"char *const direct = scratch + {self.packed}, *transposed = direct + Layer::PACKED;"
        yield "char *next_transposed = transposed + Layer::PACKED;"
        yield "cluster_barrier();"
        yield f"layer.keep(layer.example({self._batch_at(position)}), {self.examples}, bad);"
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
        for before, after in self.small.items():
            yield f"if (cluster_rank() == 0) copy({self.pointers[after]}, {self.names[before]}, {before.size});"

    def _finish(self) -> Iterator[str]:
        """The layer's outputs, and the epilogue of its product."""
        pointers = ", ".join(self.names[v] for v in (*self.forward.inputs, *self.forward.outputs))
        yield f"const Forward end = {{{pointers}}};"
        yield f"layer.finish({self.pointers[self.table]}, [&](int row, int unit, const float (&value)[4]) {{"
        yield f"    end(0, row, unit0 + unit, (int64_t)row * {self.units} + unit0 + unit, value);"
        yield "});"
        yield "__syncthreads();"

    def _supersteps(self) -> Iterator[str]:
        """The parts. One superstep after it is known where the next batch is, the cluster also packs this batch."""
        _, following = self.layer.position
        known = next(number for e, number in self.superstep.items() if following in e.outputs)
        yield "const bool last = run + 1 == runs;"
        for i, parts in enumerate(self.parts):
            if i:
                yield "cluster_barrier();"
            if i == known + 1:  # the loads overlap the parts
                yield f"const int64_t example = last ? 0 : layer.example({self._batch_at(following)});"
            if total := sum(part.blocks for part in parts):
                yield f"for (int item = cluster_rank(); item < {total}; item += CLUSTER) {{"
                yield from indented(list(dispatch(parts, self.names, "item", self.part_scratch[i])))
                yield "    __syncthreads();"
                yield "}"
            if i == known + 1:
                yield "if (!last) {"
                yield f"    layer.keep(example, {self.examples}, bad);"
                yield "    __syncthreads();"
                yield f"    layer.pack({self.pointers[self.table]}, direct, next_transposed);"
                yield "}"

    def _backward(self) -> Iterator[str]:
        """Gradients and updates of the layer's weights, and its outputs for the next batch."""
        gradient = self.names[body_of(self.layer.backward).equations[0].inputs[0]]
        yield f"layer.load_gradient({gradient} + unit0, {self.units});"
        yield "__syncthreads();"
        yield f"const Update update = {{{', '.join(f'*{self.names[v]}' for v in self._numbers())}}};"
        yield "if (last)"
        yield "    layer.backward<false>(transposed, direct, update);"
        yield "else"
        yield "    layer.backward<true>(transposed, direct, update);"
        yield "cluster_barrier();"
        for a, b in (("now", "following"), ("transposed", "next_transposed")):
            yield f"char *const {a}_before = {a};"
            yield f"{a} = {b}, {b} = {a}_before;"

    def _batch_at(self, position: Variable) -> str:
        """C text: the arguments of `ResidentLayer::example`."""
        return f"{self.pointers[self.order]}, (int64_t)*{self.names[position]}, {self.order.type.shape[0]}, bad"

    def _numbers(self) -> Sequence[Variable]:
        """The single numbers that the update reads."""
        after: Epilogue = epilogue(self.layer.backward)
        return [v for v in after.inputs if v not in self.held]

    def _update(self) -> Iterator[str]:
        """A struct that computes the new numbers of a weight."""
        body = flat(body_of(self.layer.backward))
        (gradient, *_), others = body.equations[0].outputs, body.equations[1:]
        numbers, states = self._numbers(), self.layer.states
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


def _direct(gemm: BlockGemm) -> BlockGemm:
    """The function for blocks of THREADS threads, whose operands need no shared memory."""
    tile = gemm.tile
    assert isinstance(tile, SmallTile), "members multiply float32 by small GEMMs"
    slices = WARPS // (tile.m // TILE * (tile.n // TILE))
    tile = replace(tile, warp_m=TILE, warp_n=TILE, slices=slices).for_k(gemm.lengths[-1])
    return replace(gemm, tile=tile, load_bytes=8)
