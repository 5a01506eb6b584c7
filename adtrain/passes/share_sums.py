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
            repeated = [v for v in e.inputs if v in producer and _repeats_an_argument(producer[v])]
            others = [split.get(v, (v, ())) for v in e.inputs if v not in repeated]
            if others:
                rest = frozenset(product for product, _ in others)
                product = others[0][0] if len(others) == 1 else products.setdefault(rest, e.outputs[0])
                factors = [factor for _, found in others for factor in found]
                split[e.outputs[0]] = product, (*factors, *(producer[v].inputs[0] for v in repeated))
        elif e.primitive.name == "sum":
            (x,), (out,), axes = e.inputs, e.outputs, e.params["axes"]
            product, of_x = split.get(x, (x, ()))
            known = sums.get((product, axes))
            if not of_x:
                sums.setdefault((product, axes), out)
            elif known and all(_rest(factor, x, axes) == out.type.shape for factor in of_x):
                equations += _multiplied(e, known, of_x)
                continue
        equations.append(e)
    return replace(program, equations=tuple(equations))


def _repeats_an_argument(equation: Equation) -> bool:
    return equation.has(Trait.BROADCAST) and bool(equation.inputs)


def _rest(factor: Variable, x: Variable, axes: tuple[int, ...]) -> Shape | None:
    """The lengths of `factor`, which is broadcast to the shape of `x`, beside the summed axes; None if it varies along
    these."""
    shape = factor.type.shape
    lengths = (1,) * (len(x.type.shape) - len(shape)) + shape
    return None if any(lengths[i] > 1 for i in axes) else tuple(n for i, n in enumerate(lengths) if i not in axes)


def _multiplied(equation: Equation, total: Variable, factors: tuple[Variable, ...]) -> list[Equation]:
    """Equations that compute the output of `equation` as a product of `total` and `factors`."""
    (out,) = equation.outputs
    shape = {"shape": out.type.shape}
    found = []
    for factor in factors:
        scale, product = (Variable(out.type, out.device) for _ in range(2))
        found += [
            replace(equation, primitive=PRIMITIVES["reshape"], inputs=(factor,), params=shape, outputs=(scale,)),
            replace(equation, primitive=PRIMITIVES["mul"], inputs=(total, scale), params={}, outputs=(product,)),
        ]
        total = product
    return [*found[:-1], replace(found[-1], outputs=(out,))]
