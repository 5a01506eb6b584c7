"""Values that a kernel computes again from arrays that it reads anyway, so that it reads one array less.

The input gradient of a convolution before batch norm and relu reads the normalised image for the mask of relu, and the
image before the norm for the sums of the norm's derivative. With this pass it computes the mask from the latter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from adtrain.backends.cuda.forms.column_sum import COLUMN_SUM
from adtrain.backends.cuda.forms.product import CONVOLUTION
from adtrain.backends.cuda.forms.product_sums import PRODUCT_SUMS
from adtrain.core.fused import LOOPS, PRODUCT, body_of, fuse, renamed
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.passes.dead_code import needed_for
from adtrain.passes.fuse_elementwise import by_element
from adtrain.passes.fuse_products import reads_by_element

FORMS = frozenset((LOOPS, PRODUCT, CONVOLUTION, PRODUCT_SUMS, COLUMN_SUM))
"""Forms whose kernels compute values again."""
CHEAP = frozenset(("broadcast_to", "add", "sub", "mul", "neg", "relu", "maximum", "minimum", "less", "where"))
"""Primitives that are computed again."""
MAX_COMPUTED = 16
"""Maximum of equations that compute a value again."""
MIN_SIZE = 1 << 16
"""Minimum elements of a value. Smaller ones are in a cache."""


@keeps(Results.EXACT)
def recompute_values(program: Program) -> Program:
    """Let a kernel compute a value of loops again, if it reads all arrays from which few cheap equations compute it."""
    loops = {v: e for e in program.equations if e.form == LOOPS for v in e.outputs}
    whole: dict[Variable, Variable] = {}
    for e in program.equations:
        if e.has(Trait.RESHAPE):
            whole |= {v: whole.get(x, x) for x in e.inputs for v in e.outputs}
    equations = [_recomputed(e, loops, whole) if e.form in FORMS else e for e in program.equations]
    read = {*program.outputs, *(v for e in equations for v in e.inputs)}
    return replace(program, equations=tuple(_only(e, read) if e.form == LOOPS else e for e in equations))


def _recomputed(e: Equation, loops: Mapping[Variable, Equation], whole: Mapping[Variable, Variable]) -> Equation:
    """`e`, which computes again what it can of its arguments.

    Args:
        whole: for each reshape the value that it is made from.
    """
    for v in e.inputs:
        if v in loops and v.size >= MIN_SIZE:
            arrays = [x for x in loops[v].inputs if x.type.shape == v.type.shape]
            vectors = (x for x in loops[v].inputs if x.type.shape != v.type.shape)
            own = {whole.get(x, x): x for x in e.inputs if x.type.shape == v.type.shape}
            names = {x: own[whole.get(x, x)] for x in arrays if whole.get(x, x) in own}
            if 0 < len(arrays) == len(names) and all(prod(x.type.shape[:-1]) == 1 for x in vectors):
                e = _computing(e, needed_for([v], body_of(loops[v]).equations), v, names)
    return e


def _computing(e: Equation, equations: list[Equation], v: Variable, names: Mapping[Variable, Variable]) -> Equation:
    """`e`, in which one loop nest reads `v`, with `equations` in it that compute `v`; else `e` as it is.

    Args:
        names: for the arrays that the equations read, those that `e` reads.
    """
    readers = [x for x in body_of(e).equations if v in x.inputs]
    in_loops = e.form == LOOPS or (len(readers) == 1 and by_element(readers[0]))
    cheap = len(equations) <= MAX_COMPUTED and all(x.primitive.name in CHEAP for x in equations)
    if not (cheap and in_loops and all(reads_by_element(x, v) for x in readers)):
        return e
    own = {**names, **{x: x.like() for each in equations for x in each.outputs}}
    copies = [replace(renamed(x, own), scope=e.scope, phase=e.phase) for x in equations]
    if e.form == LOOPS:
        return fuse(LOOPS, [*copies, *(renamed(x, {v: own[v]}) for x in body_of(e).equations)], e.outputs)
    members = [_after(copies, renamed(x, {v: own[v]})) if x in readers else x for x in body_of(e).equations]
    return fuse(e.form, members, e.outputs)


def _after(equations: list[Equation], reader: Equation) -> Equation:
    """Loops with the equations, then those of a reader."""
    return fuse(LOOPS, [*equations, *body_of(reader).equations], reader.outputs)


def _only(loops: Equation, read: set[Variable]) -> Equation:
    """The loops without results that nothing reads, if they have others."""
    needed = [v for v in loops.outputs if v in read]
    if not needed or len(needed) == len(loops.outputs):
        return loops
    return fuse(LOOPS, needed_for(needed, body_of(loops).equations), needed)
