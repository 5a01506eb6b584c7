"""Values that are computed elsewhere, so that fewer arrays are written, kept and read.

`recompute`: a kernel computes a value again that another one would write, from arrays that are in memory anyway.
Example: a matrix product reads a gradient x * w * c, and a later kernel adds the gradient to another one. The later
kernel reads x and computes the gradient again, instead of reading what an earlier kernel has written.

The CPU and GPUs use it with different forms; see `backends/cpu/fusions.py` and `backends/cuda/fusions.py`.

`keep_derivatives`: derivatives of activations are computed in the forward phase and kept instead of the activation's
argument. Backward often reads this argument only for the derivative. The loop that computes the activation can then
compute the derivative too: they share parts, such as the exponential of gelu.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from adtrain.core.primitive import Trait
from adtrain.core.program import LOOPS, Equation, Program, Variable, body_of, fuse, renamed
from adtrain.core.staging import Results, keeps
from adtrain.passes.fusion import by_element, elementwise, reads_by_element
from adtrain.passes.groups import MAX_EQUATIONS

MIN_BYTES = 1 << 20
"""Minimum bytes of a value. Smaller values stay in a cache between two kernels."""
MAX_COMPUTED = 8
"""Maximum equations that are computed again for a value. None calls a function, such as exp."""


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
def recompute(
    program: Program, sources: Collection[str], readers: Collection[str], more_arrays: bool = True
) -> Program:
    """Readers of a large value compute it themselves, where that moves fewer bytes through memory.

    Args:
        sources: the forms, besides loops, whose results may be computed again.
        readers: the forms, besides loops, whose loops can compute a value again.
        more_arrays: whether a reader may read further arrays to compute a value. If true, either all readers of a value
            compute it or none does, and at least half of its bytes are saved. If false, each reader that can compute it
            does, and the only further arrays that it reads are vectors along the last axis.
    """
    equations: list[Sequence[Equation]] = [(e,) for e in program.equations]  # the last one may be preceded by views
    producer = {v: i for i, e in enumerate(program.equations) for v in e.outputs}
    reading: dict[Variable, set[int]] = {}
    origin: dict[Variable, Variable] = {}  # for each reshape, the value that it is made from
    for i, e in enumerate(program.equations):
        for v in e.inputs:
            reading.setdefault(v, set()).add(i)
        if e.has(Trait.RESHAPE):
            origin[e.outputs[0]] = origin.get(e.inputs[0], e.inputs[0])
    for v, i in producer.items():
        if v.nbytes < MIN_BYTES or v not in reading or not _has_loops(program.equations[i], sources):
            continue
        *views, source = equations[i]
        found = _computation(source, v)
        if found is None or (more_arrays and not program.donated.isdisjoint(found.inputs)):
            continue  # an array that is read later cannot be overwritten by its update; vectors are small
        own = {r: _own_arrays(equations[r][-1], v, found, origin) for r in reading[v]}
        able = [r for r in own if _can_compute(equations[r][-1], v, found, readers)]
        if more_arrays:
            stays = v in program.outputs or len(able) < len(own)
            more = sum(x.nbytes for r in own for x in own[r].values() if x not in equations[r][-1].inputs)
            if stays or (1 + len(own)) * v.nbytes - more < v.nbytes // 2:
                continue
        else:
            able = [r for r in able if not found.views and _reads_only_vectors(equations[r][-1], v, own[r])]
            stays = v in program.outputs or len(able) < len(own)
        for r in able:
            *others, e = equations[r]
            equations[r] = (*others, *found.views, _computing(e, v, found.equations, own[r]))
            for x in own[r].values():
                reading.setdefault(x, set()).add(r)
        reading[v] -= set(able)
        if not stays:
            left = [x for x in source.outputs if x is not v]
            equations[i] = (*views, _without_others(source, left)) if left else ()
    return replace(program, equations=tuple(x for group in equations for x in group))


def _has_loops(equation: Equation, forms: Collection[str]) -> bool:
    return by_element(equation) or equation.form in forms


def _own_arrays(
    reader: Equation, v: Variable, found: _Computation, origin: Mapping[Variable, Variable]
) -> Mapping[Variable, Variable]:
    """For each array of a computation, the argument of the reader that is the same array in the shape of ``v``."""
    same = {origin.get(x, x): x for x in reader.inputs if x.type.shape == v.type.shape}
    return {x: same.get(origin.get(x, x), x) if x.type.shape == v.type.shape else x for x in found.inputs}


def _reads_only_vectors(reader: Equation, v: Variable, own: Mapping[Variable, Variable]) -> bool:
    """Whether the reader reads the arrays of the shape of ``v`` anyway, and the others are vectors of the last axis."""
    arrays = [x for x in own.values() if x.type.shape == v.type.shape]
    vectors = [x for x in own.values() if x.type.shape != v.type.shape]
    return bool(arrays) and set(arrays) <= set(reader.inputs) and all(prod(x.type.shape[:-1]) == 1 for x in vectors)


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
        elif x is not v and producer[x].has(Trait.RESHAPE) and producer[x].inputs[0] in known:
            views[producer[x]] = None
            inputs[producer[x].inputs[0]] = None
        elif not elementwise(producer[x]) or x.type.shape != v.type.shape or not _is_cheap(producer[x]):
            return None
        elif producer[x] not in own:
            own.add(producer[x])
            waiting += producer[x].inputs
    equations = [e for e in producer.values() if e in own]
    cheap = inputs and sum(not e.has(Trait.BROADCAST) for e in equations) <= MAX_COMPUTED
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
    return all(
        by_element(e) and reads_by_element(e, v) and len(body_of(e).equations) + len(found.equations) <= MAX_EQUATIONS
        for e in own
        if v in e.inputs
    )


def _computing(
    equation: Equation, v: Variable, computation: Sequence[Equation], arrays: Mapping[Variable, Variable]
) -> Equation:
    """``equation``, whose loops that read ``v`` compute it from ``arrays``."""
    if not by_element(equation):
        own = equation.params["body"].equations
        parts = (_computing(e, v, computation, arrays) if v in e.inputs else e for e in own)
        return _like(equation, parts, equation.outputs)
    copies = {**arrays, **{x: x.like() for e in computation for x in e.outputs}}
    own = [
        *(renamed(e, copies) for e in computation),
        *(renamed(e, {v: copies[v]}) for e in body_of(equation).equations),
    ]
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


@keeps(Results.EXACT)
def keep_derivatives(program: Program) -> Program:
    """Move functions of one elementwise value to its phase, where nothing else of another phase reads the value."""
    equations = list(program.equations)
    producer = {v: i for i, e in enumerate(equations) for v in e.outputs}
    readers: dict[Variable, set[int]] = {}
    for i, e in enumerate(equations):
        for v in e.inputs:
            readers.setdefault(v, set()).add(i)
    for i, e in enumerate(equations):
        if not elementwise(e) or len(e.inputs) != 1 or e.inputs[0] not in producer or e.inputs[0] in program.outputs:
            continue
        (x,) = e.inputs
        source = equations[producer[x]]
        if elementwise(source) and {r for r in readers[x] if equations[r].phase != source.phase} == {i}:
            equations[i] = replace(e, phase=source.phase)
    return replace(program, equations=tuple(equations))
