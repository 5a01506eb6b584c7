"""Regions: the parts of a Program between exchanges and fusion barriers, each of which is optimised alone.

A region's kernels depend on its own equations only. So equations that are a region of several Programs, such as the
gradient of one shard of a batch, have the same kernels in all of them, and give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from adtrain.core.array import Array
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable, arguments_of
from adtrain.core.program import renamed as with_names
from adtrain.core.staging import Pass, Results, keeps


@keeps(Results.FINITE)
def optimize_regions(program: Program, passes: Sequence[Pass]) -> Program:
    """``program`` after ``passes`` on each region. Exchanges stay in their order; barriers are removed."""
    renamed: dict[Variable, Variable] = {}
    constants: dict[Variable, Array] = {}
    equations: list[Equation] = []
    parts = list(regions(program))
    last_reader = {v: i for i, part in enumerate(parts) for e in part for v in e.inputs}
    last_reader |= dict.fromkeys(program.outputs, len(parts))
    for i, part in enumerate(parts):
        part = [with_names(e, renamed) for e in part]
        first = part[0]
        if first.has(Trait.BARRIER):
            renamed |= zip(first.outputs, first.inputs, strict=True)
        elif first.has(Trait.COLLECTIVE):
            equations.append(first)
        else:
            known = {**program.constants, **constants}
            before = _region(part, known, [v for e in part for v in e.outputs if last_reader.get(v, -1) > i])
            after = before
            for apply in passes:
                after = apply(after)
            equations += after.equations
            constants |= after.constants
            renamed |= {old: new for old, new in zip(before.outputs, after.outputs, strict=True) if old is not new}
    outputs = tuple(renamed.get(v, v) for v in program.outputs)
    used = {v for e in equations for v in e.inputs} | set(outputs)
    kept = {v: x for v, x in {**program.constants, **constants}.items() if v in used}
    return replace(program, constants=kept, equations=tuple(equations), outputs=outputs)


def regions(program: Program) -> Iterator[list[Equation]]:
    """The equations in groups: each region is one, and so is each exchange or barrier between regions."""
    found: list[Equation] = []
    for e in program.equations:
        if not (e.has(Trait.BARRIER) or e.has(Trait.COLLECTIVE)):
            found.append(e)
            continue
        if found:
            yield found
        yield [e]
        found = []
    if found:
        yield found


def _region(part: Sequence[Equation], constants: dict[Variable, Array], outputs: Sequence[Variable]) -> Program:
    """The equations as a Program of their own."""
    read = arguments_of(part)
    own = {v: constants[v] for v in read if v in constants}
    return Program(tuple(v for v in read if v not in own), own, tuple(part), tuple(outputs))
