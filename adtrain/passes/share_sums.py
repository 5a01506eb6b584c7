"""Share sums: a sum of products with a factor that does not vary along the summed axes is computed from the sum without
this factor, if that is computed anyway.

Example: with g the cotangent of the result of a batch norm, y its normalised images and w its weight, the gradients of
bias and weight are sums of g and of g y. The gradient of the images needs the sums of w g and of w g y.
"""

from __future__ import annotations

from dataclasses import replace

from adtrain.core.primitive import PRIMITIVES, Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.types import Shape


def share_sums(program: Program) -> Program:
    """``program`` with products of sums in place of sums of products, where the sum is known."""
    producer = {v: e for e in program.equations for v in e.outputs}
    products: dict[frozenset[Variable], Variable] = {}
    split: dict[Variable, tuple[Variable, tuple[Variable, ...]]] = {}
    """For each product a variable that stands for it without its broadcast factors, and the arguments of these
    broadcasts. Equal products have the same variable."""
    sums: dict[tuple[Variable, tuple[int, ...]], Variable] = {}
    equations: list[Equation] = []
    for e in program.equations:
        if e.primitive.name == "mul":
            factors = [v for v in e.inputs if v in producer and producer[v].has(Trait.BROADCAST)]
            others = [split.get(v, (v, ())) for v in e.inputs if v not in factors]
            rest = frozenset(v for v, _ in others)
            if others:
                product = next(iter(rest)) if len(others) == 1 else products.setdefault(rest, e.outputs[0])
                taken = (producer[v].inputs for v in factors)
                split[e.outputs[0]] = product, tuple(v for vs in (*(vs for _, vs in others), *taken) for v in vs)
        elif e.primitive.name == "sum":
            (x,), (out,), axes = e.inputs, e.outputs, e.params["axes"]
            product, factors_of_x = split.get(x, (x, ()))
            known = sums.get((product, axes))
            if not factors_of_x:
                sums.setdefault((product, axes), out)
            elif known and all(_rest(v, x, axes) == out.type.shape for v in factors_of_x):
                equations += _multiplied(e, known, factors_of_x)
                continue
        equations.append(e)
    return replace(program, equations=tuple(equations))


def _rest(factor: Variable, x: Variable, axes: tuple[int, ...]) -> Shape | None:
    """The lengths of `factor`, which is broadcast to the shape of `x`, beside the summed axes; None if it varies along
    these."""
    shape = factor.type.shape
    lengths = (1,) * (len(x.type.shape) - len(shape)) + shape
    return None if any(lengths[i] > 1 for i in axes) else tuple(n for i, n in enumerate(lengths) if i not in axes)


def _multiplied(equation: Equation, total: Variable, factors: tuple[Variable, ...]) -> list[Equation]:
    """Equations that compute the output of `equation` as a product of `total` and `factors`."""
    (out,) = equation.outputs
    found = []
    for i, factor in enumerate(factors):
        scale = Variable(out.type, out.device)
        found.append(
            replace(
                equation,
                primitive=PRIMITIVES["reshape"],
                inputs=(factor,),
                params={"shape": out.type.shape},
                outputs=(scale,),
            )
        )
        product = out if i == len(factors) - 1 else Variable(out.type, out.device)
        found.append(
            replace(equation, primitive=PRIMITIVES["mul"], inputs=(total, scale), params={}, outputs=(product,))
        )
        total = product
    return found
