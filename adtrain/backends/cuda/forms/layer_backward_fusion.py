"""Fuse the gradient of a layer's inputs with the gradient and update of its weights, in a Program by member.

Both read the weights and the gradient of the layer's outputs. Together they read the weights once
(kernels/cuda/gemm/layer_backward.cuh).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from adtrain.backends.cuda.forms.resident_layer import MAX_BATCH, TERMS, TILE, WARPS
from adtrain.backends.cuda.forms.streamed_layer_fusion import (
    MIN_CAPABILITY,
    ROW_ALIGNMENT,
    of_all_members,
    of_members,
    parts_of,
    without,
)
from adtrain.core.fused import LAYER_BACKWARD, PRODUCT, body_of, fuse, per_member_p, renamed
from adtrain.core.precision import FULL
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.core.target import Target

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
    if target.capability < MIN_CAPABILITY:
        return program
    equations = list(program.equations)
    for e in program.equations:
        of_inputs = _product_of_inputs(e)
        if of_inputs is None:
            continue
        at = equations.index(e)
        gradient, weights = (of_all_members(e)[v] for v in body_of(of_inputs).equations[0].inputs)
        later = {v for x in equations[at:] for v in x.outputs}
        for i, other in enumerate(equations[at + 1 :], at + 1):
            of_weights = _update(other, gradient, weights, later)
            if of_weights is None:
                continue
            fused = _fused(e, of_inputs, other, of_weights)
            if layer_backward_of(fused.params["body"].equations[0]).fits(target):
                removed = {of_all_members(other)[v] for v in of_weights.outputs}
                equations[i : i + 1] = without(other, removed)
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


def _product_of_inputs(equation: Equation) -> Equation | None:
    """The equation in a `per_member` equation, if it is the only one and may be the gradient of a layer's inputs."""
    found = parts_of(equation)
    return found[0] if len(found) == 1 and _is_product(found[0], transpose_a=False) else None


def _update(equation: Equation, gradient: Variable, weights: Variable, later: set[Variable]) -> Equation | None:
    """The equation in a `per_member` equation that computes the gradient and update of `weights`.

    Its inputs must not be in `later`. Those of the update must be arrays of the type of the weights, or single numbers.
    """
    if equation.primitive is not per_member_p:
        return None
    outside = of_all_members(equation)
    for e in parts_of(equation):
        if not _is_product(e, transpose_a=True):
            continue
        inputs = [outside[v] for v in e.inputs]
        product = body_of(e).equations[0]
        types = {v.type for v in (*product.outputs, *e.outputs)}
        of_update = [v for v in e.inputs if v not in product.inputs]
        arrays = [v for v in of_update if v.type in types]
        alike = len(types) == 1 and len(arrays) == len(e.outputs)
        single = all(v.size == 1 for v in of_update if v not in arrays)
        known = later.isdisjoint(inputs) and weights in inputs
        if outside[product.inputs[0]] is gradient and known and alike and single:
            return e
    return None


def _fused(first: Equation, of_inputs: Equation, second: Equation, of_weights: Equation) -> Equation:
    """The `layer_backward` equation of all members.

    Args:
        first, second: `per_member` equations, which contain `of_inputs` and `of_weights`.
    """
    inner = {v: w for w, v in of_all_members(first).items()}
    flags = dict(zip(first.inputs, first.params["mapped"], strict=True))
    flags |= dict(zip(second.inputs, second.params["mapped"], strict=True))
    outside = of_all_members(second)
    names = {}
    for v in (*of_weights.inputs, *of_weights.outputs):
        names[v] = inner.setdefault(outside[v], Variable(v.type, v.device))
    own = [of_inputs, renamed(of_weights, names)]
    one = fuse(LAYER_BACKWARD, own, {v for e in own for v in e.outputs})
    of_all = of_all_members(first) | {w: v for v, w in inner.items()}
    inputs, outputs = (tuple(of_all[v] for v in group) for group in (one.inputs, one.outputs))
    return of_members(one, inputs, outputs, [flags[v] for v in inputs], first.params["count"])
