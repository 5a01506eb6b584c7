"""Programs without the fusions that a GPU has no kernels for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from adtrain.core.fused import FUSED, loops_p
from adtrain.core.program import Equation, Program


class Flat(NamedTuple):
    """A Program in which only `loops` are fused, and for each of its equations the one that it stood in before."""

    program: Program
    origin: tuple[int, ...]


def flattened(program: Program) -> Flat:
    """``program`` with the members of products, items and groups of updates in their place."""
    found = [(member, i) for i, e in enumerate(program.equations) for member in _members(e)]
    return Flat(replace(program, equations=tuple(e for e, _ in found)), tuple(i for _, i in found))


def _members(equation: Equation) -> Iterator[Equation]:
    if equation.primitive in FUSED and equation.primitive is not loops_p:
        for member in equation.params["body"].equations:  # a body names its variables as the equation does
            yield from _members(member)
    else:
        yield equation
