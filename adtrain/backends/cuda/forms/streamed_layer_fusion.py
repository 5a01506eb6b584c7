"""Stream the weights of the first layer of a sweep's members, where they cannot stay on chip.

One equation computes the first product, another one the gradient and the update. In repeated steps `prefetch_batch`
joins the update of a step with the first product of the next one. So a step reads the weights once, and writes them
once. Both equations read the batch as bytes from its table (kernels/cuda/gemm/streamed_layer.cuh).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from adtrain.backends.cuda.forms.resident_steps_fusion import step_of_members
from adtrain.core.fused import GATHER, HORIZONTAL, STREAMED_LAYER, body_of, fuse, per_member_p, renamed
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
    step = None if target.capability < MIN_CAPABILITY else step_of_members(program)
    if step is None:
        return program
    body, names, count = step
    layer = resident_layer(body)
    if layer is None:
        return program
    of_all = {w: v for v, w in names.items()}
    views = [e for e in body.equations if e.has(Trait.RESHAPE) and e.inputs[0] is layer.gather.outputs[0]]
    made = []
    for e in (layer.forward, layer.backward):
        parts = [layer.gather, *(view for view in views if view.outputs[0] in e.inputs), e]
        made.append(fuse(STREAMED_LAYER, parts, e.outputs))
    both = StreamedLayer((layer.gather, layer.backward), (layer.gather, layer.forward))
    if both.shared > target.shared or not both.has_inputs_for_all_warps:
        return program
    dropped = {of_all[v] for e in (layer.gather, *views) for v in e.outputs}
    streamed = {of_all[v]: e for e in made for v in e.outputs}
    equations: list[Equation] = []
    for e in program.equations:
        if not dropped.isdisjoint(e.outputs):
            continue
        own = dict.fromkeys(streamed[v] for v in e.outputs if v in streamed)
        if own:
            equations += without(e, set(streamed))
        else:
            equations.append(e)
        for x in own:
            inputs, outputs = (tuple(of_all[v] for v in group) for group in (x.inputs, x.outputs))
            flags = [names[v].type != v.type for v in inputs]
            equations.append(of_members(x, inputs, outputs, flags, count))
    return replace(program, equations=tuple(equations))


def of_members(
    one: Equation, inputs: Sequence[Variable], outputs: Sequence[Variable], mapped: Sequence[bool], count: int
) -> Equation:
    """The `per_member` equation of an equation of one member."""
    params = {"body": Program(one.inputs, {}, (one,), one.outputs), "count": count, "mapped": tuple(mapped)}
    return replace(one, primitive=per_member_p, inputs=tuple(inputs), outputs=tuple(outputs), params=params)


def parts_of(equation: Equation) -> Sequence[Equation]:
    """The equations in a `per_member` equation; none in another one."""
    if equation.primitive is not per_member_p:
        return ()
    (one,) = equation.params["body"].equations
    found: Sequence[Equation] = one.params["body"].equations if one.form == HORIZONTAL else (one,)
    return found


def of_all_members(equation: Equation) -> dict[Variable, Variable]:
    """For each input and output in the body of a `per_member` equation, the variable of all members."""
    body: Program = equation.params["body"]
    return dict(zip((*body.inputs, *body.outputs), (*equation.inputs, *equation.outputs), strict=True))


def without(equation: Equation, removed: set[Variable]) -> Iterator[Equation]:
    """A `per_member` equation without the parts that compute `removed` values. Nothing if no part is left."""
    body: Program = equation.params["body"]
    outside = of_all_members(equation)
    flags = dict(zip(body.inputs, equation.params["mapped"], strict=True))
    left = [part for part in parts_of(equation) if removed.isdisjoint(outside[v] for v in part.outputs)]
    if left:
        own = left[0] if len(left) == 1 else fuse(HORIZONTAL, left, body.outputs)
        inputs, outputs = (tuple(outside[v] for v in group) for group in (own.inputs, own.outputs))
        yield of_members(own, inputs, outputs, [flags[v] for v in own.inputs], equation.params["count"])


def streamed_equations(program: Program) -> Sequence[Equation]:
    """The `per_member` equations of a product of the first layer, and of its gradient and update."""
    found = [e for e in program.equations if e.primitive is per_member_p]
    return [e for e in found if e.params["body"].equations[0].form == STREAMED_LAYER]


def joined(update: Equation, product: Equation, next_value: Mapping[Variable, Variable], result: Variable) -> Equation:
    """The equation that computes an update, and then the product of the next step.

    Args:
        update, product: of `streamed_equations`.
        next_value: the value that replaces an input in the next step.
        result: of the product of the next step.
    """
    (first,), (second,) = (e.params["body"].equations for e in (update, product))
    outer = [*update.inputs, *update.outputs]
    inner = dict(zip(outer, (*first.inputs, *first.outputs), strict=True))
    mapped = dict(zip(update.inputs, update.params["mapped"], strict=True))
    names: dict[Variable, Variable] = {}
    for v, own, flag in zip(product.inputs, second.inputs, product.params["mapped"], strict=True):
        following = next_value.get(v, v)
        names[own] = inner.setdefault(following, Variable(own.type, own.device))
        mapped.setdefault(following, flag)
    equations = second.params["body"].equations
    names |= {v: Variable(v.type, v.device) for e in equations for v in e.outputs}
    together = [*first.params["body"].equations, *(renamed(e, names) for e in equations)]
    own = fuse(STREAMED_LAYER, together, {*first.outputs, *(names[v] for v in second.outputs)})
    outside = {w: v for v, w in inner.items()} | {names[second.outputs[0]]: result}
    inputs, outputs = (tuple(outside[v] for v in group) for group in (own.inputs, own.outputs))
    own = replace(own, scope=update.scope, phase=update.phase)
    return of_members(own, inputs, outputs, [mapped[v] for v in inputs], update.params["count"])
