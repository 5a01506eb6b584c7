"""The gradient of a layer's inputs with the gradient and update of its weights, in a Program by member.

Both read the weights and the gradient of the layer's outputs. Together they read the weights once
(kernels/cuda/gemm/layer_backward.cuh).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from adtrain.backends.cuda.codegen.part import Kernel, Part, kernel, part_names, resident_blocks
from adtrain.backends.cuda.codegen.product import epilogue
from adtrain.backends.cuda.forms.form import Form, define
from adtrain.backends.cuda.forms.resident_layer import (
    MAX_BATCH,
    TERMS,
    THREADS,
    TILE,
    WARPS,
    update_arguments,
    update_struct,
    updated_arrays,
)
from adtrain.backends.cuda.forms.streamed_layer import ROW_ALIGNMENT
from adtrain.core.fused import PRODUCT, body_of, fuse, launched_together, without
from adtrain.core.precision import FULL
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.core.target import TENSOR_CORES, Target
from adtrain.passes.places import overwrites, read_once

LAYER_BACKWARD = "layer_backward"
"""The gradient of the inputs of a linear layer of one member, and the gradient and update of its weights."""
BLOCK_INPUTS = 64, 32, 16
"""Inputs of the layer that a block may have."""
MAX_UNITS = 4 * WARPS * 32
"""Units of the largest layer: a thread loads four."""


@dataclass(frozen=True)
class LayerBackward:
    """The equations in a `layer_backward` equation: products with epilogues."""

    of_inputs: Equation
    of_weights: Equation

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Examples of a batch, inputs and units."""
        (batch, units), (_, inputs) = (v.type.shape for v in body_of(self.of_inputs).equations[0].inputs)
        return batch, inputs, units

    @property
    def block_inputs(self) -> int:
        return next(n for n in BLOCK_INPUTS if self.lengths[1] % n == 0)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        batch, _, units = self.lengths
        whole, rest = ROW_ALIGNMENT

        def terms(columns: int) -> int:
            return TERMS * batch * (2 * columns + (rest - 2 * columns) % whole)

        groups = WARPS * TILE // self.block_inputs
        sums = groups * batch * self.block_inputs * 4
        return max(terms(units), sums) + terms(self.block_inputs) + (units + self.block_inputs + batch) * 4

    def fits(self, target: Target) -> bool:
        batch, inputs, units = self.lengths
        tiled = not (batch % TILE or inputs % TILE or units % TILE) and batch <= MAX_BATCH
        return tiled and units <= MAX_UNITS and self.shared <= target.shared


def layer_backward_of(equation: Equation) -> LayerBackward:
    of_inputs, of_weights = body_of(equation).equations
    return LayerBackward(of_inputs, of_weights)


@keeps(Results.EXACT)
def fuse_layer_backward(program: Program, target: Target) -> Program:
    """The Program with `layer_backward` equations."""
    if target.capability < TENSOR_CORES:
        return program
    equations = list(program.equations)
    for e in program.equations:
        if not e.members or not _is_product(e, transpose_a=False):
            continue
        at = equations.index(e)
        later = {v for x in equations[at:] for v in x.outputs}
        for i, other in enumerate(equations[at + 1 :], at + 1):
            update = next((x for x in launched_together(other) if _is_update(x, e, later)), None)
            if update is None:
                continue
            fused = fuse(LAYER_BACKWARD, [e, update], {*e.outputs, *update.outputs})
            if layer_backward_of(fused).fits(target):
                equations[i : i + 1] = without(other, set(update.outputs))
                equations[at] = fused
            break
    return replace(program, equations=tuple(equations))


def _is_product(equation: Equation, transpose_a: bool) -> bool:
    """Whether it is a product of two float32 matrices in full precision, and the second is not transposed."""
    if equation.form != PRODUCT:
        return False
    product = body_of(equation).equations[0]
    kind = tuple(product.params[name] for name in ("transpose_a", "transpose_b", "precision"))
    float32 = all(v.type.dtype == np.float32 for v in (*product.inputs, *equation.outputs))
    return kind == (transpose_a, False, FULL) and float32 and all(len(v.type.shape) == 2 for v in product.inputs)


def _is_update(equation: Equation, of_inputs: Equation, later: set[Variable]) -> bool:
    """Whether it computes the gradient and update of the weights of a layer.

    Its inputs must not be in `later`. Those of the update must be arrays of the type of the weights, or single numbers.

    Args:
        of_inputs: may be the gradient of the inputs of the layer.
    """
    if not equation.members or not _is_product(equation, transpose_a=True):
        return False
    gradient, weights = body_of(of_inputs).equations[0].inputs
    product = body_of(equation).equations[0]
    types = {v.type for v in (*product.outputs, *equation.outputs)}
    of_update = [v for v in equation.inputs if v not in product.inputs]
    arrays = [v for v in of_update if v.type in types]
    alike = len(types) == 1 and len(arrays) == len(equation.outputs)
    single = all(v.size == 1 for v in of_update if v not in arrays)
    known = later.isdisjoint(equation.inputs) and weights in equation.inputs
    return product.inputs[0] is gradient and known and alike and single


def layer_backward(equation: Equation, target: Target) -> Kernel:
    """The kernel of one member."""
    body, layer = body_of(equation), layer_backward_of(equation)
    batch, inputs, units = layer.lengths
    gradient, weights = body_of(layer.of_inputs).equations[0].inputs
    x = body_of(layer.of_weights).equations[0].inputs[1]
    before = sorted(updated_arrays(layer.of_weights), key=lambda v: v is not weights)
    after = layer.of_weights.outputs
    names = part_names(body.inputs, body.outputs)
    end = epilogue(layer.of_inputs, "OfInputs")
    lines = [
        f"typedef LayerBackward<{batch}, {units}, {inputs}, {layer.block_inputs}, {len(before)}> Layer;",
        f'static_assert(Layer::SHARED == {layer.shared}, "as planned");',
        f"const Layer layer(block * {layer.block_inputs});",
        f"const float *const from[{len(before)}] = {{{', '.join(names[v] for v in before)}}};",
        f"float *const to[{len(after)}] = {{{', '.join(names[v] for v in after)}}};",
        f"const Update update = {{{', '.join(f'*{names[v]}' for v in update_arguments(layer.of_weights))}}};",
        f"const OfInputs epilogue = {{{', '.join(names[v] for v in (*end.inputs, *end.outputs))}}};",
        f"layer.run({names[gradient]}, {names[x]}, from, to, update,",
        "    [&](int row, int input, const float (&value)[4]) {",
        f"        epilogue(0, row, input, (int64_t)row * {inputs} + input, value);",
        "    });",
    ]
    headers = "common/epilogue.cuh", "gemm/layer_backward.cuh"
    definitions = "\n".join([end.text, *update_struct(layer.of_weights, before, after)])
    blocks = inputs // layer.block_inputs
    part = Part(lines, body.inputs, body.outputs, headers, definitions, blocks, layer.shared)
    return kernel("layer_backward", [part], THREADS, "float", resident_blocks(layer.shared, target))


def _overwrites(equation: Equation, argument: Variable, result: Variable) -> bool:
    """A warp reads a tile of weights once, then writes it."""
    update = layer_backward_of(equation).of_weights
    if argument in update.inputs and result in update.outputs:
        return overwrites(update, argument, result)
    return read_once(equation, argument, result)


define(Form(LAYER_BACKWARD, lambda equation, target: [layer_backward(equation, target)], overwrites=_overwrites))
