"""The kernel of a `streamed_layer` equation: a product of the first layer, or its gradient and update, or both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from adtrain.backends.cuda.codegen.loops import flat
from adtrain.backends.cuda.codegen.part import FIRST_STATEMENT, OPTIONS, Kernel, indented
from adtrain.backends.cuda.codegen.product import Epilogue, epilogue
from adtrain.backends.cuda.compiler import Source
from adtrain.codegen.elementwise import statements
from adtrain.codegen.expressions import c_type, pointer
from adtrain.core.fused import body_of
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.target import Target
from adtrain.passes.resident_layer import input_of_byte, table_gathers
from adtrain.passes.stream_layer import THREADS, StreamedLayer, streamed_layer_of

RESERVED = 1 << 10
"""Bytes of shared memory of a block that the driver uses."""
MAX_RESIDENT = 2
"""Blocks of a multiprocessor: each has the registers that it needs."""


def streamed_layer(equation: Equation, target: Target) -> Kernel:
    """The kernel of one member."""
    body, layer = body_of(equation), streamed_layer_of(equation)
    return _Writer(body, layer).kernel(target)


class _Writer:
    """Writes the kernel.

    Attributes:
        before, after: the weights and their optimizer state. The product reads the first one.
        pointers: the kernel's arguments, as C text.
    """

    def __init__(self, body: Program, layer: StreamedLayer) -> None:
        self.body, self.layer = body, layer
        self.batch, self.inputs, self.units = layer.lengths
        self.operands = [*body.inputs, *body.outputs]
        self.pointers = {v: f"p{i}" for i, v in enumerate(self.operands)}
        self.before, self.after = [], []
        weights = body_of(layer.forward[1]).equations[0].inputs[1] if layer.forward else None
        if layer.backward is None:
            assert weights is not None, "it has a product"
            self.before = [weights]
        else:
            update = layer.backward[1]
            shape = self.units, self.inputs
            self.before = [v for v in epilogue(update).inputs if v.type.shape == shape]
            self.after = sorted(update.outputs, key=lambda v: v is not weights)

    def kernel(self, target: Target) -> Kernel:
        layer, block_units, shared = self.layer, self.layer.block_units, self.layer.shared
        resident = min(MAX_RESIDENT, (target.shared + RESERVED) // (shared + RESERVED))
        written = set(self.body.outputs)
        parameters = [f"{pointer(v, const=v not in written)}{self.pointers[v]}" for v in self.operands]
        text = [
            "#define T float",
            f"constexpr int THREADS = {THREADS};",
            '#include "common/epilogue.cuh"',
            '#include "gemm/streamed_layer.cuh"',
            *([epilogue(layer.forward[1], "Forward").text] if layer.forward else []),
            *self._update(),
            *self._input_of_byte(),
            f"typedef StreamedLayer<{self.inputs}, {block_units}, {self.batch}, {len(self.before)}> Layer;",
            f'static_assert({layer.batch_bytes} + Layer::FRAGMENTS + Layer::SUMS + Layer::ROWS == {shared}, "as planned");',
            "",
            f"KERNEL __launch_bounds__(THREADS, {resident}) streamed_layer({', '.join(parameters)}, int *bad)",
            "{",
            f"    {FIRST_STATEMENT}",
            *indented(list(self._statements())),
            "}",
            "",
        ]
        source = Source("streamed_layer.cu", "\n".join(text), OPTIONS)
        size = self.units // block_units, THREADS, shared, 0
        return Kernel(source, "streamed_layer", self.operands, *size, checked=True)

    def _statements(self) -> Iterator[str]:
        layer, states = self.layer, len(self.before)
        pairs = [pair for pair in (layer.backward, layer.forward) if pair is not None]
        table = self.pointers[table_gathers(pairs[0][0])[0].inputs[0]]
        _, numbers = input_of_byte(pairs[0][0])
        arguments = "".join(f", *{self.pointers[v]}" for v in numbers)
        yield f"const int unit0 = blockIdx.x * {layer.block_units};"
        yield f"const float of_0 = input_of_byte(0{arguments}), of_255 = input_of_byte(255{arguments});"
        yield f"const Layer layer({layer.batch_bytes}, (of_255 - of_0) / 255, of_0);"
        yield f"const float *const from[{states}] = {{{self._rows(self.before)}}};"
        yield f"float *const to[{states}] = {{{self._rows(self.after)}}};"
        yield "layer.prefetch_first(from);"
        for which, (gather, _) in enumerate(pairs):
            examples, indices = table_gathers(gather)
            place = f"{self.pointers[indices.inputs[0]]}, *{self.pointers[indices.inputs[1]]}"
            counts = f"{indices.inputs[0].type.shape[0]}, {examples.inputs[0].type.shape[0]}"
            yield f"layer.set_rows({which}, {place}, {counts}, bad);"
        yield "__syncthreads();"
        yield from (f"layer.copy_batch({which}, {table});" for which in range(len(pairs)))
        yield "cp_async_commit_group();"
        if layer.backward is not None:
            gradient = self.pointers[body_of(layer.backward[1]).equations[0].inputs[0]]
            yield f"layer.load_gradient({gradient} + unit0, {self.units});"
        yield "cp_async_wait_group<0>();"
        yield "__syncthreads();"
        yield f"const Update update = {{{', '.join(f'*{self.pointers[v]}' for v in self._update_arguments())}}};"
        yield "Layer::Outputs outputs;"
        flags = ", ".join("true" if pair is not None else "false" for pair in (layer.backward, layer.forward))
        yield f"layer.pass<{flags}>(outputs, from, to, update);"
        if layer.forward is not None:
            after: Epilogue = epilogue(layer.forward[1])
            pointers = ", ".join(self.pointers[v] for v in (*after.inputs, *after.outputs))
            weights = "to[0]" if layer.backward is not None else "from[0]"
            yield f"const Forward epilogue = {{{pointers}}};"
            yield f"layer.finish(outputs, {len(pairs) - 1}, {table}, {weights}, [&](int row, int unit, const float (&value)[4]) {{"
            yield f"    epilogue(0, row, unit0 + unit, (int64_t)row * {self.units} + unit0 + unit, value);"
            yield "});"

    def _rows(self, arrays: Sequence[Variable]) -> str:
        """C text: pointers to this block's rows of some arrays."""
        return ", ".join(f"{self.pointers[v]} + unit0 * {self.inputs}" for v in arrays)

    def _update_arguments(self) -> Sequence[Variable]:
        """The single numbers that the update reads, such as the learning rate."""
        if self.layer.backward is None:
            return []
        return [v for v in epilogue(self.layer.backward[1]).inputs if v not in self.before]

    def _update(self) -> Iterator[str]:
        """A struct that updates a weight and its optimizer state, given the gradient."""
        numbers, states = self._update_arguments(), len(self.before)
        body = []
        if self.layer.backward is not None:
            product, *others = flat(body_of(self.layer.backward[1])).equations
            values = {product.outputs[0]: "gradient"} | {v: f"a{i}" for i, v in enumerate(numbers)}
            values |= {v: f"state[{i}]" for i, v in enumerate(self.before)}
            program = Program(tuple(values), {}, tuple(others), tuple(self.after))
            body = [*statements(program, values, [f"const float new{i}" for i in range(states)])]
            body += [f"state[{i}] = new{i};" for i in range(states)]
        yield "struct Update {"
        yield from (f"    {c_type(v.type.dtype)} a{i};" for i, v in enumerate(numbers))
        yield f"    __device__ __forceinline__ void operator()(float gradient, float (&state)[{states}]) const {{"
        yield from indented(indented(body))
        yield "    }"
        yield "};"

    def _input_of_byte(self) -> Iterator[str]:
        """A function from a byte to an input of the layer."""
        pair = self.layer.backward or self.layer.forward
        assert pair is not None, "it has one of them"
        program, numbers = input_of_byte(pair[0])
        values = {program.inputs[0]: "byte"} | {v: f"a{i}" for i, v in enumerate(numbers)}
        parameters = ["uint8_t byte", *(f"{c_type(v.type.dtype)} a{i}" for i, v in enumerate(numbers))]
        yield f"static __device__ float input_of_byte({', '.join(parameters)})"
        yield "{"
        yield from indented(statements(program, values, ["const float found"]))
        yield "    return found;"
        yield "}"
