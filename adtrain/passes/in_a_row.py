"""Runs in a row: what a run begins with, such as the gather of its batch, the run before computes beside other work.

It is software pipelining, of one stage: Allan, Jones, Lee and Allan, "Software Pipelining", ACM Computing Surveys 27
(1995).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from adtrain.core.fused import together_p
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.target import Target
from adtrain.passes.fuse_blocks import renamed
from adtrain.passes.fuse_elementwise import is_loops
from adtrain.passes.readers_first import readers_first
from adtrain.passes.side_by_side import side_by_side


@dataclass(frozen=True)
class InARow:
    """A Program cut for several runs in a row: `begin` once, `again` for each run but the last one, and `last`.

    Attributes:
        begin: the equations that a run begins with; their results are inputs of `again` and `last`, behind the
            Program's own.
        again: the others in a run that another one follows, and what that one begins with as further outputs; None if
            nothing is fetched.
        last: the others.
    """

    begin: Sequence[Equation]
    again: Program | None
    last: Program


def in_a_row(program: Program, target: Target) -> InARow:
    """Cut a fused Program so that each run begins what the next one begins with, if that saves a launch.

    What it needs must be there when a run has begun: inputs, of which the next values are results of equations of
    inputs, such as a counter's. A Program in which no equations share a launch stays whole: it is not fused, and its
    kernels are those of its equations. So does one whose products would share launches with others than now, as that
    decides how they are computed: all runs leave the same bits.
    """
    whole = InARow((), None, program)
    if not program.carries or not any(e.primitive is together_p for e in program.equations):
        return whole
    following = dict(zip((v for v in program.inputs if v in program.donated), program.outputs, strict=True))
    given = {*program.inputs, *program.constants}
    soon = given | {v for e in _apart(program.equations) if given.issuperset(e.inputs) for v in e.outputs}

    def can_begin(e: Equation) -> bool:
        early = given.issuperset(e.inputs) and soon.issuperset(following.get(v, v) for v in e.inputs)
        return early and e.primitive.name != "reshape" and set(program.outputs).isdisjoint(e.outputs)

    begin = [e for e in program.equations if can_begin(e)]
    if not begin:
        return whole
    rest = [e for e in program.equations if e not in begin]
    fetched = tuple(v for e in begin for v in e.outputs)
    inputs = (*program.inputs, *fetched)
    ahead = {v: Variable(v.type, v.device) for v in fetched}
    again = Program(
        inputs,
        program.constants,
        (*_apart(rest), *(renamed(e, following | ahead) for e in _apart(begin))),
        (*program.outputs, *ahead.values()),
        program.donated | set(fetched),
    )
    again = readers_first(side_by_side(again, target))
    new = frozenset(ahead.values())
    if _launches(again) >= _launches(program) or _in_company(again.equations, new) != _in_company(rest, new):
        return whole
    return InARow(begin, again, replace(program, inputs=inputs, equations=tuple(rest)))


def _apart(equations: Sequence[Equation]) -> list[Equation]:
    """The equations with those that share a launch each by itself."""
    return [m for e in equations for m in (e.params["body"].equations if e.primitive is together_p else (e,))]


def _in_company(equations: Sequence[Equation], but: frozenset[Variable]) -> set[tuple[bool, frozenset[Variable]]]:
    """Of each launch whether several equations share it, and results of theirs, but those of loops and those given."""
    launches = ((e, frozenset(v for m in _apart([e]) if not is_loops(m) for v in m.outputs) - but) for e in equations)
    return {(e.primitive is together_p, made) for e, made in launches if made}


def _launches(program: Program) -> int:
    return sum(e.primitive.name != "reshape" for e in program.equations)
