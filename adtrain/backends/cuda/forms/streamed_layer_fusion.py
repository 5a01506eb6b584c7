"""Stream the weights of the first layer of a sweep's members, where they cannot stay on chip.

One equation computes the first product, another one the gradient and the update. In repeated steps `prefetch_batch`
joins the update of a step with the first product of the next one. So a step reads the weights once, and writes them
once. Both equations read the batch as bytes from its table (kernels/cuda/gemm/streamed_layer.cuh).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from adtrain.backends.cuda.forms.resident_layer import (
    FLOAT,
    ROW_BYTES,
    TILE,
    WARPS,
    groups_of_warps,
    lengths_of,
    operand_bytes,
    resident_layer,
    sums_bytes,
)
from adtrain.backends.cuda.forms.resident_steps_fusion import step_of_member
from adtrain.core.fused import GATHER, STREAMED_LAYER, body_of, fuse, renamed, without
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.core.target import Target

MIN_CAPABILITY = (8, 0)
"""The first compute capability with asynchronous copies."""
BLOCK_UNITS = 32, 16
"""Units that a block may have: a warp has 16 of them, and the warps of a group have different ones."""
ROW_ALIGNMENT = 128, 16
"""A row of a batch in shared memory begins 16 bytes after a multiple of 128."""


@dataclass(frozen=True)
class StreamedLayer:
    """What a `streamed_layer` equation computes: a gradient and an update, or a product, or first the one and then the
    other. A product is a `product` equation, and has the `gather` equation of its batch."""

    backward: tuple[Equation, Equation] | None
    forward: tuple[Equation, Equation] | None

    @property
    def pairs(self) -> Sequence[tuple[Equation, Equation]]:
        """What it has of both, in the order of their computation."""
        return [pair for pair in (self.backward, self.forward) if pair is not None]

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Examples of a batch, inputs and units."""
        return lengths_of(self.pairs[0][1])

    @property
    def block_units(self) -> int:
        return next(n for n in BLOCK_UNITS if self.lengths[2] % n == 0)

    @property
    def has_inputs_for_all_warps(self) -> bool:
        """Whether each group of warps has at least 16 inputs, the fewest that it can compute."""
        return groups_of_warps(self.block_units) * TILE <= self.lengths[1]

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
            product = body_of(e).equations[0]
            transposed = product.params["transpose_a"]
            x = product.inputs[1 if transposed else 0]
            pair = gathers[views.get(x, x)], e
            backward, forward = (pair, forward) if transposed else (backward, pair)
    return StreamedLayer(backward, forward)


@keeps(Results.EXACT)
def stream_layer(program: Program, target: Target) -> Program:
    """The Program with two `streamed_layer` equations, if its first layer is suitable. Else the Program, unchanged."""
    body = None if target.capability < MIN_CAPABILITY else step_of_member(program)
    layer = None if body is None else resident_layer(body)
    if body is None or layer is None:
        return program
    views = [e for e in body.equations if e.has(Trait.RESHAPE) and e.inputs[0] is layer.gather.outputs[0]]
    streamed: dict[Variable, Equation] = {}
    for e in (layer.forward, layer.backward):
        parts = [layer.gather, *(view for view in views if view.outputs[0] in e.inputs), e]
        streamed |= dict.fromkeys(e.outputs, fuse(STREAMED_LAYER, parts, e.outputs))
    both = StreamedLayer((layer.gather, layer.backward), (layer.gather, layer.forward))
    if both.shared > target.shared or not both.has_inputs_for_all_warps:
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
