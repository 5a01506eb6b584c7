"""Recompute values that one kernel would write and another one read, from arrays that are in memory anyway.

Example: a gradient x * w * c is added to another one, after a matrix product that depends on it. The kernel of the sum
reads x and computes the gradient again, instead of reading what an earlier kernel has written.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from adtrain.core.fused import LOOPS, body_of, fuse, renamed
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.passes.fuse_elementwise import by_element, elementwise
from adtrain.passes.groups import MAX_EQUATIONS

MIN_BYTES = 1 << 20
"""Smaller values stay in a cache between two kernels."""
MOST = 8
"""Maximum equations that are computed again. None calls a function, such as exp."""


class _Computation(NamedTuple):
    """How a value is computed from arrays in memory.

    Attributes:
        views: reshapes of these arrays.
        equations: elementwise equations; the last one computes the value.
        inputs: the arrays.
    """

    views: Sequence[Equation]
    equations: Sequence[Equation]
    inputs: Collection[Variable]


@keeps(Results.EXACT)
def recompute(program: Program, forms: Collection[str]) -> Program:
    """Readers of a large value compute it themselves, if half of its bytes or more need not move through memory.

    Args:
        forms: the forms whose bodies may have loops, which can compute more.
    """
    equations: list[Sequence[Equation]] = [(e,) for e in program.equations]  # the last one may be preceded by views
    producer = {v: i for i, e in enumerate(program.equations) for v in e.outputs}
    readers: dict[Variable, set[int]] = {}
    for i, e in enumerate(program.equations):
        for v in e.inputs:
            readers.setdefault(v, set()).add(i)
    for v, i in producer.items():
        if v.nbytes < MIN_BYTES or v in program.outputs or v not in readers:
            continue
        if not _has_loops(program.equations[i], forms):
            continue
        *views, source = equations[i]
        found = _computation(source, v)
        if found is None or not program.donated.isdisjoint(found.inputs):
            continue
        reading = [equations[r][-1] for r in readers[v]]
        more = sum(x.nbytes for e in reading for x in found.inputs if x not in e.inputs)
        saved = (1 + len(reading)) * v.nbytes - more
        if saved >= v.nbytes // 2 and all(_can_compute(e, v, found, forms) for e in reading):
            for r in readers[v]:
                *others, e = equations[r]
                equations[r] = (*others, *found.views, _computing(e, v, found))
            for x in found.inputs:
                readers.setdefault(x, set()).update(readers[v])
            left = [x for x in source.outputs if x is not v]
            equations[i] = (*views, _without_others(source, left)) if left else ()
    return replace(program, equations=tuple(x for group in equations for x in group))


def _has_loops(equation: Equation, forms: Collection[str]) -> bool:
    return by_element(equation) or equation.form in forms


def _single(equation: Equation) -> Sequence[Equation]:
    """The equations in a fused one, those of its loops in their place."""
    own = body_of(equation).equations
    return [x for e in own for x in (body_of(e).equations if e.form == LOOPS else (e,))]


def _computation(source: Equation, v: Variable) -> _Computation | None:
    """How ``v`` is computed from the arguments and other results of its equation; None if that is not cheap."""
    producer = {x: e for e in _single(source) for x in e.outputs}
    known = {*source.inputs, *source.outputs} - {v}
    views, own, inputs = dict[Equation, None](), set[Equation](), dict[Variable, None]()
    waiting = [v]
    while waiting:
        x = waiting.pop()
        if x in known:
            inputs[x] = None
        elif producer[x].has(Trait.RESHAPE) and producer[x].inputs[0] in known:
            views[producer[x]] = None
            inputs[producer[x].inputs[0]] = None
        elif not elementwise(producer[x]) or x.type.shape != v.type.shape or not _is_cheap(producer[x]):
            return None
        elif producer[x] not in own:
            own.add(producer[x])
            waiting += producer[x].inputs
    equations = [e for e in producer.values() if e in own]
    cheap = inputs and sum(not e.has(Trait.BROADCAST) for e in equations) <= MOST
    return _Computation([*views], equations, [*inputs]) if cheap else None


def _is_cheap(equation: Equation) -> bool:
    """Whether an element is a few instructions: no function is called."""
    text = equation.primitive.expression
    return equation.has(Trait.BROADCAST) or (isinstance(text, str) and not re.search(r"\w\(", text))


def _can_compute(equation: Equation, v: Variable, found: _Computation, forms: Collection[str]) -> bool:
    """Whether loops of ``equation`` can compute ``v``."""
    if not _has_loops(equation, forms):
        return False
    own = (equation,) if by_element(equation) else equation.params["body"].equations
    reading = [e for e in own if v in e.inputs]
    return all(
        by_element(e)
        and all(x.type.shape == v.type.shape for x in e.outputs)
        and len(body_of(e).equations) + len(found.equations) <= MAX_EQUATIONS
        for e in reading
    )


def _computing(equation: Equation, v: Variable, found: _Computation) -> Equation:
    """``equation``, whose loops that read ``v`` compute it."""
    if not by_element(equation):
        own = equation.params["body"].equations
        return _like(equation, (_computing(e, v, found) if v in e.inputs else e for e in own), equation.outputs)
    copies = {x: x.like() for e in found.equations for x in e.outputs}
    own = [renamed(e, copies) for e in (*found.equations, *body_of(equation).equations)]
    return fuse(LOOPS, [replace(e, scope=equation.scope, phase=equation.phase) for e in own], equation.outputs)


def _without_others(equation: Equation, needed: Collection[Variable]) -> Equation:
    """``equation`` without what it computes only for results that are not needed."""
    if equation.form == "" or not any(v in needed for v in equation.outputs):
        return equation
    used, own = set(needed), list[Equation]()
    for e in reversed(equation.params["body"].equations):
        if not used.isdisjoint(e.outputs):
            part = _without_others(e, used.intersection(e.outputs)) if e.form == LOOPS else e
            own.append(part)
            used.update(part.inputs)
    return own[0] if len(own) == 1 else _like(equation, own[::-1], needed)


def _like(equation: Equation, own: Iterable[Equation], needed: Collection[Variable]) -> Equation:
    """An equation of the same form, scope and phase."""
    return replace(fuse(equation.form, [*own], needed), scope=equation.scope, phase=equation.phase)
