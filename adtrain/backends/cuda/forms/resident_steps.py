"""Several steps of a sweep's member by one launch, if the weights of the first layer can stay on chip.

A cluster of thread blocks computes the steps. The weights of the first layer and their optimizer state stay in shared
memory (resident). So they are read from device memory once in a launch, not several times in each step. The products
of the layer are in `kernels/cuda/gemm/resident_layer.cuh`. `resident_layer.py` divides the other equations among the
blocks, and `codegen/resident.py` gives their values places in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from adtrain.backends.cuda.codegen.block_rules import overlapped_take
from adtrain.backends.cuda.codegen.loops import epilogue
from adtrain.backends.cuda.codegen.part import (
    FIRST_STATEMENT,
    OPTIONS,
    Kernel,
    Part,
    aligned_to_vector,
    dispatch,
    indented,
)
from adtrain.backends.cuda.codegen.resident import ALIGNMENT, ResidentPlaces, fused, gradient_of, resident_rule
from adtrain.backends.cuda.compiler import Source
from adtrain.backends.cuda.forms import Form, define
from adtrain.backends.cuda.forms.one_block import names_of, part_of
from adtrain.backends.cuda.forms.resident_layer import (
    THREADS,
    ClusterShards,
    ResidentLayer,
    cluster_shards,
    input_function,
    input_of_byte,
    resident_layer,
    table_gathers,
    update_arguments,
    update_struct,
)
from adtrain.codegen.elementwise import pointer
from adtrain.core.kernel import HOPPER, Target
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable, body_of, fused_p, launched_together
from adtrain.core.staging import Results, keeps
from adtrain.lowering.shapes import split_at
from adtrain.passes.plan_memory import of_one_type

RESIDENT_STEPS = "resident_steps"
"""A training step of one member. A launch computes several steps, with the weights of the first layer on chip. The body
has the equations that would otherwise be launches. Its outputs replace its first inputs in the next step."""


@keeps(Results.EXACT)
def fuse_resident_steps(program: Program, target: Target) -> Program:
    """The step of all members as one equation, if their first layer can stay on chip. Else the Program, unchanged."""
    body = None if target.capability < HOPPER else step_of_member(program)
    if body is None:
        return program
    made = {v for e in body.equations if not e.has(Trait.RESHAPE) for v in e.outputs}
    layer = resident_layer(body) if made.issuperset(body.outputs) else None
    blocks = layer.blocks(target.shared) if layer else None
    if layer is None or blocks is None or cluster_shards(body, layer, blocks) is None:
        return program
    scopes = dict.fromkeys(scope for e in program.equations for scope in e.scope.split("+") if scope)
    ends = body.inputs, {"form": RESIDENT_STEPS, "body": body}, body.outputs
    return replace(program, equations=(Equation(fused_p, *ends, "+".join(scopes), layer.backward.phase),))


def step_of_member(program: Program) -> Program | None:
    """A step that can repeat, with the members of `horizontal` equations in place of these equations.

    Inputs that a step replaces come first, in the order of the outputs that replace them, as `resident_layer.carried`
    expects. None if the Program is no such step by member, or if batching rules compute some of its equations.
    """
    distinct = len(set(program.outputs)) == len(program.outputs)
    stacked = any(e.has(Trait.MEMBERS) for e in program.equations)
    if not program.members or not program.carries or not distinct or stacked:
        return None
    others = (v for v in program.inputs if v not in program.donated)
    inputs = (*program.donated_inputs, *others, *program.constants)
    equations = tuple(x for e in program.equations for x in launched_together(e))
    return Program(inputs, {}, equations, program.outputs)


PACKED_BATCHES = 3
"""Packed batches in scratch memory: one for the forward product, two for the gradients of this and the next step."""
HEADERS = "gemm/resident_layer.cuh", "reduce/register_rows.cuh"


def resident_steps(equation: Equation, target: Target) -> Kernel:
    """The kernel of one member."""
    body = body_of(equation)
    layer = resident_layer(body)
    assert layer is not None, "the pass that made the equation has found the layer"
    blocks = layer.blocks(target.shared)
    assert blocks is not None, "the pass has found that the layer fits"
    shards = cluster_shards(body, layer, blocks)
    assert shards is not None, "the pass has found that a cluster can divide the step"
    segments = [fused(segment) for segment in shards.segments]
    shards = replace(shards, segments=segments, rest=fused(shards.rest))
    return _Writer(body, layer, blocks, shards, target.shared).kernel()


class _Writer:
    """Writes the kernel.

    Attributes:
        places: where values lie.
        pointers: the kernel's arguments, as C text.
        parts: of each segment of `shards`, and of the rest with what the layer does beside it.
        part_scratch: the byte of a block's scratch memory where each part's begins.
        packed: the byte of the scratch memory where packed batches start. Before it are values that blocks exchange, in
            two places: a step writes one while slower blocks may still read the other.
        own, own_bytes: the byte where the scratch memory of the first block starts, and the bytes of each block.
    """

    def __init__(self, body: Program, layer: ResidentLayer, blocks: int, shards: ClusterShards, shared: int) -> None:
        self.layer, self.blocks, self.shards = layer, blocks, shards
        self.batch, self.inputs, units = layer.lengths
        self.units = units // blocks
        examples, indices = table_gathers(layer.gather)
        self.table, self.indices = examples.inputs[0], indices.inputs[0]
        self.forward = epilogue(layer.forward, "Forward")
        self.outputs = body.outputs
        self.operands = [*body.inputs, *body.outputs]
        self.pointers = {v: f"p{i}" for i, v in enumerate(self.operands)}
        self.update_arguments = update_arguments(layer.backward)
        self.places = ResidentPlaces(body, layer, blocks, shards, shared, self.update_arguments, self.pointers)
        self.packed = 2 * self.places.exchanged_bytes
        self.own = self.packed + PACKED_BATCHES * self.batch * self.inputs
        self.own_bytes = self.places.scratch_bytes
        self.parts: list[Part] = []
        self.part_scratch: list[int] = []
        for segment in (*shards.segments, shards.rest):
            part = part_of(
                segment,
                names_of(segment),
                THREADS,
                self.places.shared_bytes,
                forms=resident_rule,
                in_shared=self.places.in_shared,
                in_place=self.places.values_in_outputs(segment),
                beside=self._beside_rest() if segment is shards.rest else (),
            )
            self.parts.append(part)
            self.part_scratch.append(self.own_bytes)
            self.own_bytes += aligned_to_vector(part.scratch)

    def kernel(self) -> Kernel:
        layer = self.layer
        resident, workspace = layer.shared_bytes(self.blocks)
        parameters = [f"{pointer(v, const=v not in self.outputs)}{self.pointers[v]}" for v in self.operands]
        headers = dict.fromkeys(["common/common.cuh", *(h for part in self.parts for h in part.headers)])
        lengths = f"{self.inputs}, {self.units}, {self.batch}, {len(layer.states)}"
        text = [
            "#define T float",
            *(f'#include "{header}"' for header in headers),
            f"constexpr int THREADS = {THREADS};",
            *(f'#include "{header}"' for header in HEADERS),
            self.forward.text,
            *update_struct(layer.backward, [v for v, _ in layer.states], [v for _, v in layer.states]),
            *input_function(layer.gather),
            f"typedef ResidentLayer<{lengths}> Layer;",
            f'static_assert(Layer::RESIDENT + Layer::SUMS_AND_ROWS == {resident}, "as planned");',
            f'static_assert(Layer::WORKSPACE == {workspace}, "as planned");',
            "",
            "KERNEL CLUSTER_DIMS __launch_bounds__(THREADS) resident_steps(",
            f"    {', '.join(parameters)}, int64_t runs, char *scratch, int *bad)",
            "{",
            f"    {FIRST_STATEMENT}",
            *indented(list(self._statements())),
            "}",
            "",
        ]
        source = Source("resident_steps.cu", "\n".join(text), (*OPTIONS, f"-DCLUSTER={self.blocks}"))
        size = self.blocks, THREADS, self.places.workspace + resident, self.own + self.blocks * self.own_bytes
        return Kernel(source, "resident_steps", self.operands, *size, checked=True, repeats=True)

    def _statements(self) -> Iterator[str]:
        batch_number, _ = self.layer.batch_number
        _, numbers = input_of_byte(self.layer.gather)
        arguments = "".join(f", *{self.pointers[v]}" for v in numbers)
        yield f"const int unit0 = cluster_rank() * {self.units};"
        yield f"char *exchanged = scratch, *next_exchanged = scratch + {self.places.exchanged_bytes};"
        yield f"char *const direct = scratch + {self.packed};"
        yield "char *transposed = direct + Layer::PACKED, *next_transposed = transposed + Layer::PACKED;"
        yield f"scratch += {self.own} + cluster_rank() * {self.own_bytes};"
        for memory, begin, size in self.places.swapped:
            yield f"auto *this_{memory} = {begin}, *next_{memory} = {begin} + {size};"
        yield f"const float of_0 = input_of_byte(0{arguments}), of_255 = input_of_byte(255{arguments});"
        yield f"const Layer layer(shared_bytes, {self.places.workspace}, (of_255 - of_0) / 255, of_0);"
        for i, (before, _) in enumerate(self.layer.states):
            yield f"layer.load({i}, {self.pointers[before]} + unit0 * {self.inputs});"
        for v in self.places.copied:
            whole, begin, rows, length = self._slice(v)
            to, source = self.places.name(v), f"{self.pointers[v]} + {begin}"
            yield f"copy_rows({to}, {length}, {source}, {whole}, {rows}, {length});"
        yield "__syncthreads();"
        yield self._set_row(self._example(self._number(batch_number)))
        yield "__syncthreads();"
        yield "Layer::Batch first;"
        yield f"layer.load_batch({self.pointers[self.table]}, first);"
        yield "layer.store_batch(first, direct, transposed);"
        if self.places.received is not None:
            yield f"Mbarrier &received = *(Mbarrier *)(shared_bytes + {self.places.received});"
            yield "if (threadIdx.x == 0) received.init(1), fence_mbarrier_init();"
        yield "cluster_barrier();"
        yield "Layer::Sums sums;"
        yield "layer.forward(direct, sums);"
        yield "#pragma unroll 1"
        yield "for (int64_t run = 0; run < runs; run++) {"
        yield from indented([*self._finish(), *self._segments(), *self._backward()])
        yield "}"
        for i, (_, after) in enumerate(self.layer.states):
            yield f"layer.store({i}, {self.pointers[after]} + unit0 * {self.inputs});"
        for before, after in self.places.carried.items():
            whole, begin, rows, length = self._slice(after)
            test = "" if after in self.shards.axes else "if (cluster_rank() == 0) "
            to = f"{self.pointers[after]} + {begin}"
            yield f"{test}copy_rows({to}, {whole}, {self.places.name(before)}, {length}, {rows}, {length});"

    def _slice(self, v: Variable) -> tuple[int, str, int, int]:
        """A block's part of an array as a slice of each row: the length of a row, where the slice begins (C text), the
        number of rows, the length of the slice."""
        if v not in self.shards.axes:
            return v.size, "0", 1, v.size
        outer, length, inner = split_at(v.type.shape, self.shards.axes[v])
        return length * inner, f"unit0 * {inner}", outer, length // self.blocks * inner

    def _finish(self) -> Iterator[str]:
        """The outputs of the layer, with the epilogue of its product."""
        pointers = ", ".join(self.places.name(v) for v in (*self.forward.inputs, *self.forward.outputs))
        first, pitch = self._columns()
        yield f"const Forward epilogue = {{{pointers}}};"
        yield f"layer.finish({self.pointers[self.table]}, sums, epilogue, {first}, {pitch});"
        yield "__syncthreads();"

    def _columns(self) -> tuple[str, int]:
        """Where the units of a block begin in a row of outputs of the layer, and the length of the row."""
        return ("unit0", self.units * self.blocks) if self.shards.gathered else ("0", self.units)

    def _segments(self) -> Iterator[str]:
        """The equations, and the next batch. Its examples are read after the first segment, which finds its number."""
        yield "const bool last = run + 1 == runs;"
        texts = [
            [*dispatch([part], self.places.names, "0", at), "__syncthreads();"]
            for part, at in zip(self.parts, self.part_scratch, strict=True)
        ]
        first, *segments, rest = texts
        yield from first
        number, batches = self._number(self.layer.batch_number[1]), self.indices.type.shape[0]
        yield f"const int64_t example = last ? 0 : {self._example(number)};"
        # The step after it probably takes the next batch, which is prefetched.
        yield f"const int64_t later = last ? 0 : {self._example(f'{number} + ({number} + 1 < {batches})')};"
        declared, loads, stores = self._early_gathers()
        yield from (*declared, *loads)
        if self.places.received is None:
            send, wait = "cluster_arrive_after_sync();", "cluster_wait();"
        else:
            at = f"(char *)shared_bytes + {self.places.received + ALIGNMENT}"
            send = f"send_to_cluster<{self.places.received_bytes}>({at}, received);"
            wait = "wait_for_cluster(received, run % 2);"
        yield send
        # A barrier of the block follows. After it other threads read what these lines store.
        yield f"if (!last) {self._set_row('example')}"
        yield from stores
        yield wait
        yield "__syncthreads();"
        yield "Layer::Batch batch;"
        yield f"if (!last) layer.load_batch({self.pointers[self.table]}, batch);"
        for i, segment in enumerate(segments):
            if i:
                yield "cluster_barrier();"
            yield from segment
        yield from rest

    def _early_gathers(self) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
        """The early gathers: declarations, loads to registers, and stores of what was loaded.

        The last threads of the block gather, because the first ones look up examples.
        """
        names = dict(self.places.names)
        declared: list[str] = []
        loads: list[str] = []
        stores: list[str] = []
        for i, e in enumerate(self.shards.early_gathers.equations):
            (y,) = e.outputs
            if e.has(Trait.RESHAPE):
                names[y] = names[e.inputs[0]]
                continue
            declared.append(f"auto *const early{i} = {names[y]};")
            names[y] = f"early{i}"
            for step in overlapped_take(e, names, THREADS):
                declared += step.declared
                for lines, found in ((step.loads, loads), (step.lines, stores)):
                    found += ["{", "    const int t = THREADS - 1 - threadIdx.x;", *indented(lines), "}"]
        return declared, loads, stores

    def _beside_rest(self) -> Sequence[Sequence[str]]:
        """What the layer does beside the rest of the equations, by phase.

        It splits its gradient into terms, packs the next batch, and prefetches the one after it.
        """
        first, pitch = self._columns()
        gradient = f"{self.places.name(gradient_of(self.layer))} + {first}, {pitch}"
        return (
            (
                "float gradient[4][2];",
                f"layer.load_gradient({gradient}, gradient);",
                "if (!last) layer.store_batch(batch, direct, next_transposed);",
                f"layer.prefetch({self.pointers[self.table]}, later, {self.table.type.shape[0]});",
            ),
            ("cluster_arrive_after_sync();", "layer.split_gradient(gradient);"),
        )

    def _backward(self) -> Iterator[str]:
        """The gradients and updates of the layer's weights, and the product of the new weights and the next batch."""
        yield f"const Update update = {{{', '.join(f'*{self.places.name(v)}' for v in self.update_arguments)}}};"
        yield "cluster_wait();"
        yield "if (last)"
        yield "    layer.backward<false>(transposed, direct, update, sums);"
        yield "else"
        yield "    layer.backward<true>(transposed, direct, update, sums);"
        for name in ("transposed", "exchanged", *(f"this_{memory}" for memory, _, _ in self.places.swapped)):
            other = name.replace("this", "next") if name.startswith("this") else f"next_{name}"
            yield f"auto *const old_{name} = {name};"
            yield f"{name} = {other}, {other} = old_{name};"

    def _number(self, batch_number: Variable) -> str:
        return f"(int64_t)*{self.places.name(batch_number)}"

    def _example(self, number: str) -> str:
        """C text: the example of this thread's row of the batch with this number."""
        return f"layer.example({self.pointers[self.indices]}, {number}, {self.indices.type.shape[0]}, bad)"

    def _set_row(self, example: str) -> str:
        return f"layer.set_row({self.pointers[self.table]}, {example}, {self.table.type.shape[0]}, bad);"


define(
    Form(
        RESIDENT_STEPS,
        lambda equation, target: [resident_steps(equation, target)],
        overwrites=of_one_type,  # results are written after the last step
    )
)
