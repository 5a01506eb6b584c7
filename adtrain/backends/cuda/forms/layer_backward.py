"""The kernel of a `layer_backward` equation: the gradients of a layer's inputs and weights, and the weights' update."""

from __future__ import annotations

from adtrain.backends.cuda.codegen.layer_update import update_arguments, update_struct, updated_arrays
from adtrain.backends.cuda.codegen.part import FIRST_STATEMENT, OPTIONS, Kernel, resident_blocks
from adtrain.backends.cuda.codegen.product import epilogue
from adtrain.backends.cuda.compiler import Source
from adtrain.backends.cuda.forms.form import Form, define
from adtrain.backends.cuda.forms.layer_backward_fusion import layer_backward_of
from adtrain.backends.cuda.forms.resident_layer import THREADS
from adtrain.codegen.expressions import pointer
from adtrain.core.fused import LAYER_BACKWARD, body_of
from adtrain.core.program import Equation, Variable
from adtrain.core.target import Target
from adtrain.passes.places import overwrites, read_once


def layer_backward(equation: Equation, target: Target) -> Kernel:
    """The kernel of one member."""
    body, layer = body_of(equation), layer_backward_of(equation)
    batch, inputs, units = layer.lengths
    gradient, weights = body_of(layer.of_inputs).equations[0].inputs
    x = body_of(layer.of_weights).equations[0].inputs[1]
    before = sorted(updated_arrays(layer.of_weights), key=lambda v: v is not weights)
    after = layer.of_weights.outputs
    resident = resident_blocks(layer.shared, target)
    operands = [*body.inputs, *body.outputs]
    pointers = {v: f"p{i}" for i, v in enumerate(operands)}
    parameters = [f"{pointer(v, const=v not in body.outputs)}{pointers[v]}" for v in operands]
    end = epilogue(layer.of_inputs, "OfInputs")
    fields = ", ".join(pointers[v] for v in (*end.inputs, *end.outputs))
    text = [
        "#define T float",
        f"constexpr int THREADS = {THREADS};",
        '#include "common/epilogue.cuh"',
        '#include "gemm/layer_backward.cuh"',
        end.text,
        *update_struct(layer.of_weights, before, after),
        f"typedef LayerBackward<{batch}, {units}, {inputs}, {layer.block_inputs}, {len(before)}> Layer;",
        f'static_assert(Layer::SHARED == {layer.shared}, "as planned");',
        "",
        f"KERNEL __launch_bounds__(THREADS, {resident}) layer_backward({', '.join(parameters)})",
        "{",
        f"    {FIRST_STATEMENT}",
        f"    const Layer layer(blockIdx.x * {layer.block_inputs});",
        f"    const float *const from[{len(before)}] = {{{', '.join(pointers[v] for v in before)}}};",
        f"    float *const to[{len(after)}] = {{{', '.join(pointers[v] for v in after)}}};",
        f"    const Update update = {{{', '.join(f'*{pointers[v]}' for v in update_arguments(layer.of_weights))}}};",
        f"    const OfInputs epilogue = {{{fields}}};",
        f"    layer.run({pointers[gradient]}, {pointers[x]}, from, to, update,",
        "        [&](int row, int input, const float (&value)[4]) {",
        f"            epilogue(0, row, input, (int64_t)row * {inputs} + input, value);",
        "        });",
        "}",
        "",
    ]
    source = Source("layer_backward.cu", "\n".join(text), OPTIONS)
    return Kernel(
        source, "layer_backward", operands, inputs // layer.block_inputs, THREADS, layer.shared, 0, checked=False
    )


def _overwrites(equation: Equation, argument: Variable, result: Variable) -> bool:
    """A warp reads a tile of weights once, then writes it."""
    update = layer_backward_of(equation).of_weights
    if argument in update.inputs and result in update.outputs:
        return overwrites(update, argument, result)
    return read_once(equation, argument, result)


define(
    Form(LAYER_BACKWARD, lambda equation, lowering: [layer_backward(equation, lowering.target)], overwrites=_overwrites)
)
