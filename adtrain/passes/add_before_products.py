"""f(a, c) + f(b, c) -> f(a + b, c), where f is linear in its first argument: one product in place of two.

Two evaluations of a network at the same points, such as those for u_t and u_xx, share the forward pass, but each has a
backward pass of its own. The gradient of a layer's weight is the sum of a product for each evaluation. This pass adds
the cotangents of the layer first, and computes one product. The layers before it then share one backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from adtrain.core.primitive import PRIMITIVES, Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.core.static_key import params_key
from adtrain.passes.common_subexpressions import merge_common_subexpressions
from adtrain.passes.dead_code import remove_dead_code


@keeps(Results.ROUNDING)
def add_before_products(program: Program) -> Program:
    """One product f(a + b, c) in place of f(a, c) + f(b, c), where f is linear in its first argument."""
    while (changed := _changed(program)) is not None:
        program = merge_common_subexpressions(remove_dead_code(changed))  # equal sums a + b are one value
    return program


def _changed(program: Program) -> Program | None:
    """The Program with one change; None if there is nothing to change."""
    reads = Counter([*program.outputs, *(v for e in program.equations for v in e.inputs)])
    producer = {v: e for e in program.equations for v in e.outputs}
    inner = {v for e in program.equations if e.name == "add" for v in e.inputs if reads[v] == 1}
    for i, e in enumerate(program.equations):
        if e.name != "add" or e.outputs[0] in inner:
            continue
        terms = [*_terms(e, producer, reads)]
        found = _pair(terms, producer, reads)
        if found is not None:
            made = _merged(e, terms, *found)
            return replace(program, equations=(*program.equations[:i], *made, *program.equations[i + 1 :]))
    return None


def _terms(e: Equation, producer: Mapping[Variable, Equation], reads: Mapping[Variable, int]) -> Iterator[Variable]:
    """What a tree of additions adds."""
    for v in e.inputs:
        own = producer.get(v)
        if own is not None and own.name == "add" and reads[v] == 1 and v.type == e.outputs[0].type:
            yield from _terms(own, producer, reads)
        else:
            yield v


Linear: TypeAlias = "tuple[Equation, int]"
"""An equation that is linear in the argument with this number."""


def _pair(
    terms: Sequence[Variable], producer: Mapping[Variable, Equation], reads: Mapping[Variable, int]
) -> tuple[Linear, Linear] | None:
    """Two terms that differ in one argument, in which they are linear."""
    known: dict[Hashable, Linear] = {}
    for v in terms:
        e = producer.get(v)
        if e is None or reads[v] != 1:
            continue
        for argument, key in _keys(e):
            other = known.setdefault(key, (e, argument))
            if other[0] is not e:
                return other, (e, argument)
    return None


def _keys(e: Equation) -> Iterator[tuple[int, Hashable]]:
    """The number of each argument in which an equation is linear, and what the equation is without it."""
    if e.has(Trait.RESHAPE) or e.has(Trait.BROADCAST):  # which are not stored
        return
    if e.has(Trait.REDUCTION) and e.outputs[0].size == 1:  # an addition of the arguments takes as long as the sum
        return
    if not (e.has(Trait.LINEAR) and len(e.inputs) == 1) and not (e.has(Trait.BILINEAR) and len(e.inputs) == 2):
        return
    for i, v in enumerate(e.inputs):
        yield i, (e.primitive.name, params_key(e.params), i, v.type, e.inputs[:i], e.inputs[i + 1 :])


def _merged(root: Equation, terms: Sequence[Variable], first: Linear, second: Linear) -> list[Equation]:
    """The equations in place of an addition `root` of the terms."""
    (e, argument), (other, _) = first, second
    a, b = e.inputs[argument], other.inputs[argument]
    total, result = a.like(), e.outputs[0].like()
    inputs = (*e.inputs[:argument], total, *e.inputs[argument + 1 :])
    made = [_add(root, a, b, total), replace(e, inputs=inputs, outputs=(result,))]
    left = [v for v in terms if v is not e.outputs[0] and v is not other.outputs[0]] + [result]
    for v in left[1:-1]:
        made.append(_add(root, left[0], v, root.outputs[0].like()))
        left[0] = made[-1].outputs[0]
    if len(left) > 1:
        return [*made, _add(root, left[0], left[-1], root.outputs[0])]
    return [made[0], replace(made[1], outputs=root.outputs)]


def _add(root: Equation, a: Variable, b: Variable, out: Variable) -> Equation:
    return Equation(PRIMITIVES["add"], (a, b), {}, (out,), root.scope, root.phase)
