"""The kernel of a `streamed_layer` equation: a product of the first layer, or its gradient and update, or both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from adtrain.backends.cuda.codegen.layer_update import input_function, update_arguments, update_struct, updated_arrays
from adtrain.backends.cuda.codegen.part import FIRST_STATEMENT, OPTIONS, Kernel, indented, resident_blocks
from adtrain.backends.cuda.codegen.product import epilogue
from adtrain.backends.cuda.compiler import Source
from adtrain.backends.cuda.forms.form import Form, define
from adtrain.backends.cuda.forms.resident_layer import THREADS, input_of_byte, table_gathers
from adtrain.backends.cuda.forms.streamed_layer_fusion import StreamedLayer, streamed_layer_of
from adtrain.codegen.expressions import pointer
from adtrain.core.fused import STREAMED_LAYER, body_of
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.target import Target


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
        self.before: Sequence[Variable] = ()
        self.after: Sequence[Variable] = ()
        weights = body_of(layer.forward[1]).equations[0].inputs[1] if layer.forward else None
        if layer.backward is None:
            assert weights is not None, "it has a product"
            self.before = (weights,)
        else:
            update = layer.backward[1]
            self.before = updated_arrays(update)
            self.after = sorted(update.outputs, key=lambda v: v is not weights)

    def kernel(self, target: Target) -> Kernel:
        layer, block_units, shared = self.layer, self.layer.block_units, self.layer.shared
        resident = resident_blocks(shared, target)
        flags = ", ".join("true" if pair else "false" for pair in (layer.backward, layer.forward))
        written = set(self.body.outputs)
        parameters = [f"{pointer(v, const=v not in written)}{self.pointers[v]}" for v in self.operands]
        text = [
            "#define T float",
            f"constexpr int THREADS = {THREADS};",
            '#include "common/epilogue.cuh"',
            '#include "gemm/streamed_layer.cuh"',
            *([epilogue(layer.forward[1], "Forward").text] if layer.forward else []),
            *self._update(),
            *input_function(layer.pairs[0][0]),
            f"typedef StreamedLayer<{self.inputs}, {block_units}, {self.batch}, {len(self.before)}, {flags}> Layer;",
            f'static_assert(Layer::SHARED == {shared}, "as planned");',
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
        layer, states, pairs = self.layer, len(self.before), self.layer.pairs
        table = self.pointers[table_gathers(pairs[0][0])[0].inputs[0]]
        _, numbers = input_of_byte(pairs[0][0])
        arguments = "".join(f", *{self.pointers[v]}" for v in numbers)
        yield f"const int unit0 = blockIdx.x * {layer.block_units};"
        yield f"const float of_0 = input_of_byte(0{arguments}), of_255 = input_of_byte(255{arguments});"
        yield "const Layer layer((of_255 - of_0) / 255, of_0);"
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
        yield "layer.pass(outputs, from, to, update);"
        if layer.forward is not None:
            end = epilogue(layer.forward[1])
            pointers = ", ".join(self.pointers[v] for v in (*end.inputs, *end.outputs))
            weights = "to[0]" if layer.backward is not None else "from[0]"
            yield f"const Forward epilogue = {{{pointers}}};"
            yield f"layer.finish(outputs, {table}, {weights}, [&](int row, int unit, const float (&value)[4]) {{"
            yield f"    epilogue(0, row, unit0 + unit, (int64_t)row * {self.units} + unit0 + unit, value);"
            yield "});"

    def _rows(self, arrays: Sequence[Variable]) -> str:
        """C text: pointers to this block's rows of some arrays."""
        return ", ".join(f"{self.pointers[v]} + unit0 * {self.inputs}" for v in arrays)

    def _update_arguments(self) -> Sequence[Variable]:
        return update_arguments(self.layer.backward[1]) if self.layer.backward else []

    def _update(self) -> Iterator[str]:
        """A struct that updates a weight and its optimizer state, or does nothing."""
        if self.layer.backward is not None:
            yield from update_struct(self.layer.backward[1], self.before, self.after)
        else:
            yield "struct Update {"
            yield "    __device__ __forceinline__ void operator()(float, float (&)[1]) const {}"
            yield "};"


define(Form(STREAMED_LAYER, lambda equation, lowering: [streamed_layer(equation, lowering.target)]))
