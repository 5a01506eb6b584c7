"""Fused primitives: an equation that stands for a small Program, its body, and runs as one kernel.

They appear in optimised Programs only, so they have no derivative. The reference is the body, equation by equation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from adtrain.core.costs import reads
from adtrain.core.primitive import PRIMITIVES, Primitive
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.types import ArrayType


def _shape(*args: Any, body: Program) -> tuple[ArrayType, ...]:
    return tuple(v.type for v in body.outputs)


def _reference(*buffers: Any, body: Program) -> Any:
    known = dict(zip(body.inputs, buffers, strict=True))
    for e in body.equations:
        found = e.primitive.reference(*(known[v] for v in e.inputs), **e.params)
        known.update(zip(e.outputs, (found,) if len(e.outputs) == 1 else found, strict=True))
    results = tuple(known[v] for v in body.outputs)
    return results[0] if len(results) == 1 else results


def _flops(*args: Any, body: Program) -> int:
    return sum(e.primitive.cost([v.type for v in e.inputs], e.params).flops for e in body.equations)


def _reads(*args: Any, body: Program) -> Sequence[int]:
    found: Counter[Variable] = Counter()
    for by_member in reads(body.equations):
        found.update(by_member)
    return [min(found[v], v.size) for v in body.inputs]


def _fused(name: str) -> Primitive:
    return Primitive(name, _shape, _reference, flops=_flops, reads=_reads)


loops_p: Primitive = _fused("loops")
"""Elementwise equations over arrays of one shape: one loop nest, nothing between them in memory."""

product_p: Primitive = _fused("product")
"""A matrix product, and loops that run on each block of it while it is in cache."""

convolution_p: Primitive = _fused("convolution")
"""A convolution, or its gradient by the images, and loops that run on its elements before they are written."""

pooled_p: Primitive = _fused("pooled")
"""A convolution, loops that run on its elements, and the max pooling of the result, which alone is written."""

items_p: Primitive = _fused("items")
"""Equations of which each needs, for item n of its outputs, item n of its inputs alone (an item is an index of axis 0);
one thread takes an item through all of them. Sums over the items may be among the outputs."""

gather_p: Primitive = _fused("gather")
"""Rows of tables by index, and loops that run on them where the tables have them."""

block_p: Primitive = _fused("block")
"""Small equations, one after the other in one thread block of a GPU."""

rows_p: Primitive = _fused("rows")
"""Equations of which each needs, for some rows of its outputs, those rows of its inputs alone (or all of a small one);
each thread block of a GPU takes its own rows through all of them."""

together_p: Primitive = _fused("together")
"""Equations that do not depend on one another, of any shapes: loops; on a GPU also products, gathers and blocks."""

PRODUCTS = (product_p, convolution_p, pooled_p)
"""Whose first equation is a product, with kernels that do what the others do to its elements."""

FUSED = frozenset((loops_p, *PRODUCTS, items_p, gather_p, block_p, rows_p, together_p))


def fuse(primitive: Primitive, equations: Sequence[Equation], needed: Sequence[Variable]) -> Equation:
    """One equation in place of several, which computes those of their outputs that are `needed`.

    It belongs to the layers of all of them, and to the phase of the one that does the most work.
    """
    made = {v for e in equations for v in e.outputs}
    inputs = tuple(dict.fromkeys(v for e in equations for v in e.inputs if v not in made))
    wanted = set(needed)
    outputs = tuple(v for e in equations for v in e.outputs if v in wanted)
    body = Program(inputs, {}, tuple(equations), outputs)
    scopes = dict.fromkeys(scope for e in equations for scope in e.scope.split("+") if scope)
    phase = max(equations, key=lambda e: e.primitive.cost([v.type for v in e.inputs], e.params).flops).phase
    return Equation(primitive, inputs, {"body": body}, outputs, "+".join(scopes), phase)


def body_of(equation: Equation) -> Program:
    """The equations that a fused equation stands for, or the one that `equation` is itself."""
    if equation.primitive in FUSED:
        body: Program = equation.params["body"]
        return body
    return Program(tuple(dict.fromkeys(equation.inputs)), {}, (equation,), equation.outputs)


def members(equation: Equation) -> tuple[str, ...]:
    """The names of the primitives that an equation stands for."""
    if equation.primitive not in FUSED:
        return (equation.primitive.name,)
    return tuple(name for e in equation.params["body"].equations for name in members(e))


def label(equation: Equation) -> str:
    """What an equation computes, each kind of operation once: "matmul+add+relu"."""
    if equation.primitive not in FUSED:
        return equation.primitive.name
    kinds = dict.fromkeys(name for name in members(equation) if not PRIMITIVES[name].view)
    return "+".join(kinds)
