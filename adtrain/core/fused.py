"""Fused primitives: the parameter ``body`` is a small Program, which runs as one kernel.

Only passes make them, after differentiation, so they have no derivative. The reference runs the body's equations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from adtrain.core.axes import Axes, aligned
from adtrain.core.batching_rules import loop
from adtrain.core.costs import reads
from adtrain.core.primitive import Primitive, Trait
from adtrain.core.program import Equation, Program, Variable, arguments_of
from adtrain.core.program_axes import axes_of_body
from adtrain.core.types import ArrayType


def _shape(*args: Any, form: str, body: Program) -> tuple[ArrayType, ...]:
    return tuple(v.type for v in body.outputs)


def _reference(*buffers: Any, form: str, body: Program) -> Any:
    known = dict(zip(body.inputs, buffers, strict=True))
    for e in body.equations:
        found = e.primitive.reference(*(known[v] for v in e.inputs), **e.params)
        known.update(zip(e.outputs, (found,) if len(e.outputs) == 1 else found, strict=True))
    results = tuple(known[v] for v in body.outputs)
    return results[0] if len(results) == 1 else results


def _flops(*args: Any, form: str, body: Program) -> int:
    first, *others = body.equations
    named = {e.name + OF_POOLED for e in others}
    if not first.has(Trait.MAX_POOL_GRAD) or form.removesuffix(WITH_SUM) not in named:
        return sum(e.cost.flops for e in body.equations)
    (pooled, _), (spread,) = first.inputs, first.outputs
    return sum(e.cost.flops * pooled.size // spread.size if spread in e.inputs else e.cost.flops for e in others)


def _reads(*args: Any, form: str, body: Program) -> Sequence[int]:
    found: Counter[Variable] = Counter()
    for of_equation in reads(body.equations):
        found.update(of_equation)
    return [min(found[v], v.size) for v in body.inputs]


def _axes(*args: Any, form: str, body: Program) -> Axes:
    if form == LOOPS:
        return aligned([v.type.shape for v in body.inputs], [v.type.shape for v in body.outputs])
    return axes_of_body(body)


fused_p: Primitive = Primitive("fused", _shape, _reference, flops=_flops, reads=_reads, batch=loop, axes=_axes)
"""Equations that run as one kernel. Its parameters are ``form``, the kind of kernel, and ``body``, the equations."""

LOOPS = "loops"
"""Elementwise equations over arrays of one shape, as one loop nest."""

PRODUCT = "product"
"""A matrix product with an elementwise epilogue."""

OF_POOLED = "_pooled"
"""With the name of a convolution's gradient before it: that gradient, after `max_pool2d_put` has spread a pooled one.
The kernel reads the pooled gradient, and skips the zeros between its elements."""

WITH_SUM = "_sum"
"""With the name of a weight gradient before it: that gradient and the bias gradient, which sums what both read."""

GATHER = "gather"
"""Loops that read rows of tables by index."""

MAP_REDUCE = "map_reduce"
"""Reductions of values of pairs of rows and columns. The pairs are computed where they are needed and never stored."""

HORIZONTAL = "horizontal"
"""Independent equations of any shapes that run side by side."""


Overwrites: TypeAlias = Callable[[Equation, Variable, Variable], bool]
"""Whether a result of a fused equation may overwrite an argument."""

OVERWRITES: dict[str, Overwrites] = {}
"""By form. Those of other forms follow from the equation of the body that reads the argument."""


def fuse(
    form: str, equations: Sequence[Equation], needed: Collection[Variable], inputs: tuple[Variable, ...] = ()
) -> Equation:
    """Fuse several equations into one of ``form``, with the outputs that are ``needed``.

    Its scope joins their scopes by "+". Its phase is that of the equation with the most FLOPs.

    Args:
        inputs: the arguments in the order of a kernel, by default in that of the equations that read them.
    """
    inputs = inputs or arguments_of(equations)
    outputs = tuple(v for e in equations for v in e.outputs if v in needed)
    body = Program(inputs, {}, tuple(equations), outputs)
    scopes = dict.fromkeys(scope for e in equations for scope in e.scope.split("+") if scope)
    phase = max(equations, key=lambda e: e.cost.flops).phase
    return Equation(fused_p, inputs, {"form": form, "body": body}, outputs, "+".join(scopes), phase)


def body_of(equation: Equation) -> Program:
    """The body of a fused equation; for any other equation, a Program of that equation."""
    if equation.form:
        body: Program = equation.params["body"]
        return body
    return Program(tuple(dict.fromkeys(equation.inputs)), {}, (equation,), equation.outputs)


def launched_together(equation: Equation) -> Sequence[Equation]:
    """The independent equations in a `horizontal` equation; for any other equation, itself."""
    found: Sequence[Equation] = equation.params["body"].equations if equation.form == HORIZONTAL else (equation,)
    return found


def without(equation: Equation, removed: Collection[Variable]) -> Sequence[Equation]:
    """An equation without its independent equations that compute ``removed`` values. Empty if nothing is left."""
    own = launched_together(equation)
    left = [e for e in own if not any(v in removed for v in e.outputs)]
    if len(left) in (0, 1, len(own)):
        return [equation] if len(left) == len(own) else left
    return [fuse(HORIZONTAL, left, equation.outputs)]


def single_equations(equation: Equation) -> Iterator[Equation]:
    """The equations in a fused equation that are not fused themselves; for any other equation, itself."""
    if equation.form:
        for e in equation.params["body"].equations:
            yield from single_equations(e)
    else:
        yield equation


def primitive_names(equation: Equation) -> tuple[str, ...]:
    """The names of the primitives in an equation."""
    return tuple(e.primitive.name for e in single_equations(equation))


def label(equation: Equation) -> str:
    """The distinct primitives of an equation, without views: "matmul+add+relu".

    If an optimizer's update is only a part of it, that part is "update": "matmul+update".
    """
    found = [e for e in single_equations(equation) if not e.primitive.view]
    whole = all(e.phase == "update" for e in found)
    names = ("update" if e.phase == "update" and not whole else e.primitive.name for e in found)
    return "+".join(dict.fromkeys(names)) or equation.name


def renamed(equation: Equation, names: dict[Variable, Variable]) -> Equation:
    """``equation`` with the variables that are keys of ``names`` replaced, in its body as well."""
    if not names:
        return equation
    params = dict(equation.params)
    if equation.form:
        body: Program = params["body"]
        inputs, outputs = (tuple(names.get(v, v) for v in group) for group in (body.inputs, body.outputs))
        equations = tuple(renamed(e, names) for e in body.equations)
        params["body"] = replace(body, inputs=inputs, outputs=outputs, equations=equations)
    inputs, outputs = (tuple(names.get(v, v) for v in group) for group in (equation.inputs, equation.outputs))
    return replace(equation, inputs=inputs, outputs=outputs, params=params)
