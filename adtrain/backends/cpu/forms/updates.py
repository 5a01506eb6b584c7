"""Update fusion on the CPU: the optimizer's updates of many small parameters as one equation."""

from __future__ import annotations

from collections.abc import Iterable

from adtrain.core.fused import HORIZONTAL, LOOPS
from adtrain.core.program import Equation
from adtrain.passes.fusion import Fusion
from adtrain.passes.groups import Groups


class UpdateFusion(Fusion):
    """The independent elementwise equations of the update, whatever their shapes."""

    form = HORIZONTAL

    def together(self, groups: Groups) -> Iterable[Iterable[int]]:
        yield [i for i, e in enumerate(groups.equations) if _is_update(e)]


def _is_update(equation: Equation) -> bool:
    return equation.form == LOOPS and equation.phase == "update" and bool(equation.outputs[0].type.shape)
