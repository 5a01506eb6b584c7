"""Elementwise fusion: connected elementwise equations become one loop nest."""

from __future__ import annotations

from typing import ClassVar

from adtrain.core.primitive import Trait
from adtrain.core.program import GATHER, LOOPS, Equation, Variable
from adtrain.passes.fusion import Fusion, FusionPass
from adtrain.passes.groups import MAX_EQUATIONS, Groups


def elementwise(equation: Equation) -> bool:
    """Whether an equation is a C expression of the elements of its arguments, or a broadcast of them."""
    return equation.primitive.expression is not None or equation.has(Trait.BROADCAST)


def by_element(equation: Equation) -> bool:
    """Whether it computes element by element: one elementwise operation, or a loop of several."""
    return equation.form == LOOPS or elementwise(equation)


def is_loops(equation: Equation) -> bool:
    """Whether generated loops compute it: it is by element, or reads rows of tables by index."""
    return equation.form in (LOOPS, GATHER) or elementwise(equation)


class ElementwiseFusion(Fusion):
    """One loop nest for each connected group of elementwise equations of one shape and phase.

    Each reader of a broadcast computes it, so that no broadcast is stored for several readers.

    Attributes:
        across_phases: whether equations of different phases may join, too.
    """

    form = LOOPS
    limit = MAX_EQUATIONS
    across_phases: ClassVar[bool] = False

    def copied(self, producer: Equation, reader: Equation) -> bool:
        return producer.has(Trait.BROADCAST) and elementwise(reader) and not reader.has(Trait.BROADCAST)

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        source, e = groups.equations[producer], groups.equations[reader]
        alike = source.outputs[0].type.shape == e.outputs[0].type.shape
        together = alike and (self.across_phases or source.phase == e.phase)
        return elementwise(source) and elementwise(e) and not e.has(Trait.WIDENING) and together


fuse_loops = FusionPass((ElementwiseFusion,))
