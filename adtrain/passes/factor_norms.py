"""Norms and sums of the gradients of examples from their factors, so that no gradient of an example is computed.

The gradient of a linear layer's weights for one example is a product AᵀB: A (T, out) has the cotangents of the
example's T rows, and B (T, in) the rows. Its squared norm is the sum of the elements of AAᵀ times those of BBᵀ, the
Gram matrices of the rows: the ghost norm (X. Li et al.: "Large language models can be strong differentially private
learners", 2022). The sum of the gradients over the examples is one product of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from adtrain.core.primitive import PRIMITIVES
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.passes.dead_code import remove_dead_code


@keeps(Results.ROUNDING)
def factor_norms(program: Program) -> Program:
    """``program`` with the squared norms and the sums of batched products by their factors, where nothing else reads
    the products, and Gram matrices are smaller than they are."""
    new: dict[Equation, list[Equation]] = {}
    for e in program.equations:
        factors = _factors(e)
        if factors is not None and factors.saves:
            for reader, is_total in _readers(program, factors.gradients):
                compute = factors.total if is_total else factors.norms
                new[reader] = _Builder(e).ending(reader.outputs[0], compute)
    equations = [x for e in program.equations for x in new.get(e, [e])]
    return remove_dead_code(replace(program, equations=tuple(equations)))


@dataclass
class _Builder:
    """Makes equations with the scope and phase of `root`. They gather in `equations`."""

    root: Equation
    equations: list[Equation] = field(default_factory=list)

    def __call__(self, name: str, *inputs: Variable, **params: Any) -> Variable:
        primitive = PRIMITIVES[name]
        (type_,) = primitive.output_types([v.type for v in inputs], params)
        out = inputs[0].like(type_)
        self.equations.append(replace(self.root, primitive=primitive, inputs=inputs, params=params, outputs=(out,)))
        return out

    def ending(self, out: Variable, compute: Callable[[_Builder], Variable]) -> list[Equation]:
        """The equations that `compute` makes, with `out` as their result."""
        compute(self)
        self.equations[-1] = replace(self.equations[-1], outputs=(out,))
        return self.equations

    def grams(self, rows: Variable, precision: str) -> Variable:
        """The products of all pairs of rows: (N, T, n) to (N, T, T)."""
        return self("matmul", rows, rows, transpose_a=False, transpose_b=True, precision=precision)

    def squares(self, x: Variable) -> Variable:
        """The sums of the squares along all axes but the first."""
        return self("sum", self("mul", x, x), axes=tuple(range(1, len(x.type.shape))))


@dataclass(frozen=True)
class _Product:
    """The gradients AᵀB of a matrix, (N, m, n), from A (N, T, m) and B (N, T, n)."""

    gradients: Variable
    a: Variable
    b: Variable
    precision: str

    @property
    def saves(self) -> bool:
        """Whether two Gram matrices have fewer elements than a gradient (Z. Bu et al.: "Scalable and efficient
        training of large convolutional neural networks with differential privacy", 2022)."""
        _, m, n = self.gradients.type.shape
        return 2 * self.a.type.shape[1] ** 2 < m * n

    def norms(self, new: _Builder) -> Variable:
        if self.a.type.shape[1] == 1:
            return new("mul", new.squares(self.a), new.squares(self.b))
        pairs = new("mul", new.grams(self.a, self.precision), new.grams(self.b, self.precision))
        return new("relu", new("sum", pairs, axes=(1, 2)))  # rounding errors can make it negative

    def total(self, new: _Builder) -> Variable:
        a, b = (new("reshape", v, shape=(math.prod(v.type.shape[:2]), v.type.shape[2])) for v in (self.a, self.b))
        return new("matmul", a, b, transpose_a=True, transpose_b=False, precision=self.precision)


def _factors(e: Equation) -> _Product | None:
    """The factors of the gradients that an equation computes."""
    is_batched = e.primitive.name == "matmul" and len(e.outputs[0].type.shape) == 3
    if is_batched and e.params["transpose_a"] and not e.params["transpose_b"]:
        a, b = e.inputs
        return _Product(e.outputs[0], a, b, e.params["precision"])
    return None


def _readers(program: Program, gradients: Variable) -> Sequence[tuple[Equation, bool]]:
    """The equations that sum gradients over the examples, with True, and those that sum the squares of an example, with
    False; none if the gradients have other readers, too."""
    found = []
    for e in program.readers.get(gradients, ()):
        is_total = e.primitive.name == "sum" and e.params["axes"] == (0,)
        reader = e if is_total else _norms(program, e)
        if reader is None or gradients in program.outputs:
            return []
        found.append((reader, is_total))
    return found


def _norms(program: Program, e: Equation) -> Equation | None:
    """The equation that sums the squares of an example, if `e` squares, and nothing else reads the squares."""
    if not (e.primitive.name == "square" or (e.primitive.name == "mul" and e.inputs[0] is e.inputs[1])):
        return None
    (out,) = e.outputs
    examples = out.type.shape[0]
    while out not in program.outputs and len(readers := program.readers.get(out, ())) == 1:
        (reader,) = readers
        if reader.primitive.name == "sum" and reader.params["axes"] == tuple(range(1, len(out.type.shape))):
            return reader
        if reader.primitive.name != "reshape" or reader.outputs[0].type.shape[:1] != (examples,):
            return None
        (out,) = reader.outputs
    return None
