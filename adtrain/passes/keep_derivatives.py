"""Derivatives of activations are computed in the forward phase and kept instead of the activation's argument.

Backward often reads this argument only for the derivative. The loop that computes the activation can then compute the
derivative too: they share parts, such as the exponential of gelu.
"""

from __future__ import annotations

from dataclasses import replace

from adtrain.core.program import Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.passes.fuse_elementwise import elementwise


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
