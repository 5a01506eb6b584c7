"""The layers of a sweep's member, where the weights of the first one cannot stay on chip.

One equation computes the first product, another one the gradient and the update. In repeated steps `prefetch_batch`
joins the update of a step with the first product of the next one. So a step reads the weights once, and writes them
once. Both equations read the batch as bytes from its table (kernels/cuda/gemm/streamed_layer.cuh).

The gradient of the inputs of a later layer, and the update of its weights, are one equation. Both need the weights and
the gradient of the outputs, so one kernel reads these once (kernels/cuda/gemm/layer_backward.cuh).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from adtrain.backends.cuda.codegen.loops import epilogue, matmul_of
from adtrain.backends.cuda.codegen.part import Kernel, Part, kernel, part_names, resident_blocks
from adtrain.backends.cuda.forms import Form, define
from adtrain.backends.cuda.forms.resident_layer import (
    FLOAT,
    MAX_BATCH,
    ROW_BYTES,
    TERMS,
    THREADS,
    TILE,
    WARPS,
    groups_of_warps,
    input_function,
    input_of_byte,
    lengths_of,
    operand_bytes,
    resident_layer,
    sums_bytes,
    table_gathers,
    update_arguments,
    update_struct,
    updated_arrays,
)
from adtrain.backends.cuda.forms.resident_steps import step_of_member
from adtrain.core.kernel import TENSOR_CORES, Target
from adtrain.core.precision import FULL
from adtrain.core.primitive import Trait
from adtrain.core.program import (
    GATHER,
    PRODUCT,
    Equation,
    Program,
    Variable,
    body_of,
    fuse,
    launched_together,
    renamed,
    without,
)
from adtrain.core.staging import Results, keeps
from adtrain.passes.plan_memory import overwrites, read_once

STREAMED_LAYER = "streamed_layer"
"""The first layer of one member, whose inputs are gathered bytes: its product, or the gradient and update of its
weights, or the update and then the product of the next step. The weights are read and written once."""
BLOCK_UNITS = 32, 16
"""Units that a block may have: a warp has 16 of them, and the warps of a group have different ones."""
ROW_ALIGNMENT = 128, 16
"""A row of a batch in shared memory begins 16 bytes after a multiple of 128."""


@dataclass(frozen=True)
class StreamedLayer:
    """What a `streamed_layer` equation computes.

    Attributes:
        backward: the `gather` equation of a batch, and the product for the gradient of the weights with their update.
        forward: the `gather` equation of a batch, and the `product` equation of the layer. It comes after `backward`.
    """

    backward: tuple[Equation, Equation] | None
    forward: tuple[Equation, Equation] | None

    @property
    def pairs(self) -> Sequence[tuple[Equation, Equation]]:
        """`backward` and `forward` where they are computed, in this order."""
        return [pair for pair in (self.backward, self.forward) if pair is not None]

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Examples of a batch, inputs and units."""
        return lengths_of(self.pairs[0][1])

    @property
    def block_units(self) -> int:
        return next(n for n in BLOCK_UNITS if self.lengths[2] % n == 0)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: batches or partial sums, the gradient, sums, and where examples begin."""
        batch, inputs, _ = self.lengths
        whole, rest = ROW_ALIGNMENT
        batches = len(self.pairs) * batch * (inputs + (rest - inputs) % whole)
        first = max(batches, WARPS * TILE * batch * FLOAT.itemsize)
        operand, sums = operand_bytes(batch, self.block_units), sums_bytes(batch, self.block_units)
        return first + operand + sums + 2 * batch * ROW_BYTES


def streamed_layer_of(equation: Equation) -> StreamedLayer:
    """What a `streamed_layer` equation computes."""
    backward = forward = None
    views: dict[Variable, Variable] = {}
    gathers: dict[Variable, Equation] = {}
    for e in body_of(equation).equations:
        if e.form == GATHER:
            gathers[e.outputs[0]] = e
        elif e.has(Trait.RESHAPE):
            views[e.outputs[0]] = e.inputs[0]
        else:
            product = matmul_of(e)
            transposed = product.params["transpose_a"]
            x = product.inputs[1 if transposed else 0]
            pair = gathers[views.get(x, x)], e
            backward, forward = (pair, forward) if transposed else (backward, pair)
    return StreamedLayer(backward, forward)


@keeps(Results.EXACT)
def stream_layer(program: Program, target: Target) -> Program:
    """The Program with two `streamed_layer` equations, if its first layer is suitable. Else the Program, unchanged."""
    body = None if target.capability < TENSOR_CORES else step_of_member(program)
    layer = None if body is None else resident_layer(body)
    if body is None or layer is None:
        return program
    views = [e for e in body.equations if e.has(Trait.RESHAPE) and e.inputs[0] is layer.gather.outputs[0]]
    streamed: dict[Variable, Equation] = {}
    for e in (layer.forward, layer.backward):
        parts = [layer.gather, *(view for view in views if view.outputs[0] in e.inputs), e]
        streamed |= dict.fromkeys(e.outputs, fuse(STREAMED_LAYER, parts, e.outputs))
    both = StreamedLayer((layer.gather, layer.backward), (layer.gather, layer.forward))
    # Each group of warps has at least 16 inputs, the fewest that it can compute.
    if both.shared > target.shared or groups_of_warps(both.block_units) * TILE > both.lengths[1]:
        return program
    removed = {v for e in (layer.gather, *views) for v in e.outputs} | set(streamed)
    equations: list[Equation] = []
    for e in program.equations:
        equations += without(e, removed)
        equations += dict.fromkeys(streamed[v] for v in e.outputs if v in streamed)
    return replace(program, equations=tuple(equations))


def streamed_equations(program: Program) -> Sequence[Equation]:
    """The equations of a product of the first layer, and of its gradient and update."""
    return [e for e in program.equations if e.form == STREAMED_LAYER]


def update_and_product(
    update: Equation, product: Equation, next_value: Mapping[Variable, Variable], result: Variable
) -> Equation:
    """The equation that computes an update, and then the product of the next step.

    Args:
        update, product: of `streamed_equations`.
        next_value: the value that replaces an input in the next step.
        result: of the product of the next step.
    """
    following = body_of(product).equations
    names = {v: v.like() for e in following for v in e.outputs} | dict.fromkeys(product.outputs, result)
    names |= {v: next_value[v] for v in product.inputs if v in next_value}
    together = [*body_of(update).equations, *(renamed(e, names) for e in following)]
    return replace(fuse(STREAMED_LAYER, together, {*update.outputs, result}), scope=update.scope, phase=update.phase)


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
        self.pointers = part_names(body.inputs, body.outputs)
        self.before: Sequence[Variable] = ()
        self.after: Sequence[Variable] = ()
        weights = matmul_of(layer.forward[1]).inputs[1] if layer.forward else None
        if layer.backward is None:
            assert weights is not None, "it has a product"
            self.before = (weights,)
        else:
            update = layer.backward[1]
            self.before = updated_arrays(update)
            self.after = sorted(update.outputs, key=lambda v: v is not weights)

    def kernel(self, target: Target) -> Kernel:
        layer, block_units, shared = self.layer, self.layer.block_units, self.layer.shared
        flags = ", ".join("true" if pair else "false" for pair in (layer.backward, layer.forward))
        lines = [
            f"typedef StreamedLayer<{self.inputs}, {block_units}, {self.batch}, {len(self.before)}, {flags}> Layer;",
            f'static_assert(Layer::SHARED == {shared}, "as planned");',
            *self._statements(),
        ]
        forward = [epilogue(layer.forward[1], "Forward").text] if layer.forward else []
        definitions = "\n".join([*forward, *self._update(), *input_function(layer.pairs[0][0])])
        headers, blocks = ("common/epilogue.cuh", "gemm/streamed_layer.cuh"), self.units // block_units
        part = Part(lines, self.body.inputs, self.body.outputs, headers, definitions, blocks, shared, checked=True)
        return kernel("streamed_layer", [part], THREADS, "float", resident_blocks(shared, target))

    def _statements(self) -> Iterator[str]:
        layer, states, pairs = self.layer, len(self.before), self.layer.pairs
        table = self.pointers[table_gathers(pairs[0][0])[0].inputs[0]]
        _, numbers = input_of_byte(pairs[0][0])
        arguments = "".join(f", *{self.pointers[v]}" for v in numbers)
        yield f"const int unit0 = block * {layer.block_units};"
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
            gradient = self.pointers[matmul_of(layer.backward[1]).inputs[0]]
            yield f"layer.load_gradient({gradient} + unit0, {self.units});"
        yield "cp_async_wait_group<0>();"
        yield "__syncthreads();"
        numbers = update_arguments(layer.backward[1]) if layer.backward else []
        yield f"const Update update = {{{', '.join(f'*{self.pointers[v]}' for v in numbers)}}};"
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

    def _update(self) -> Iterator[str]:
        """A struct that updates a weight and its optimizer state, or does nothing."""
        if self.layer.backward is not None:
            yield from update_struct(self.layer.backward[1], self.before, self.after)
        else:
            yield "struct Update {"
            yield "    __device__ __forceinline__ void operator()(float, float (&)[1]) const {}"
            yield "};"


define(Form(STREAMED_LAYER, lambda equation, target: [streamed_layer(equation, target)]))


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
        (batch, units), (_, inputs) = (v.type.shape for v in matmul_of(self.of_inputs).inputs)
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
            if LayerBackward(e, update).fits(target):
                equations[i : i + 1] = without(other, set(update.outputs))
                equations[at] = fused
            break
    return replace(program, equations=tuple(equations))


def _is_product(equation: Equation, transpose_a: bool) -> bool:
    """Whether it is a product of two float32 matrices in full precision, and the second is not transposed."""
    if equation.form != PRODUCT:
        return False
    product = matmul_of(equation)
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
    gradient, weights = matmul_of(of_inputs).inputs
    product = matmul_of(equation)
    types = {v.type for v in (*product.outputs, *equation.outputs)}
    of_update = [v for v in equation.inputs if v not in product.inputs]
    arrays = [v for v in of_update if v.type in types]
    alike = len(types) == 1 and len(arrays) == len(equation.outputs)
    single = all(v.size == 1 for v in of_update if v not in arrays)
    known = later.isdisjoint(equation.inputs) and weights in equation.inputs
    return product.inputs[0] is gradient and known and alike and single


def layer_backward(equation: Equation, target: Target) -> Kernel:
    """The kernel of one member."""
    body = body_of(equation)
    layer = LayerBackward(*body.equations)
    batch, inputs, units = layer.lengths
    gradient, weights = matmul_of(layer.of_inputs).inputs
    x = matmul_of(layer.of_weights).inputs[1]
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
    _, update = body_of(equation).equations
    if argument in update.inputs and result in update.outputs:
        return overwrites(update, argument, result)
    return read_once(equation, argument, result)


define(Form(LAYER_BACKWARD, lambda equation, target: [layer_backward(equation, target)], overwrites=_overwrites))
