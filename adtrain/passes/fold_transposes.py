"""Transposes around matrix products become flags of the products, so that no transposed copy is written."""

from __future__ import annotations

from dataclasses import replace

from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.passes.dead_code import remove_dead_code


@keeps(Results.ROUNDING)
def fold_transposes(program: Program) -> Program:
    """``program`` without transposes of the matrices that products read or write.

    A transposed factor is read in place. If only the transposed result is needed, it is the product of the transposed
    factors in the other order: an element is the same sum.
    """
    source = {e.outputs[0]: e.inputs[0] for e in program.equations if _swaps_matrix_axes(e)}
    transposed = _results_to_transpose(program, source)
    source = {v: x for v, x in source.items() if x not in transposed}
    equations = []
    for e in program.equations:
        if _has_flags(e):
            (a, b), (out,) = e.inputs, e.outputs
            flags = [e.params["transpose_a"] ^ (a in source), e.params["transpose_b"] ^ (b in source)]
            factors = [source.get(a, a), source.get(b, b)]
            if out in transposed:
                out, factors, flags = transposed[out], factors[::-1], [not flag for flag in reversed(flags)]
            params = {**e.params, "transpose_a": flags[0], "transpose_b": flags[1]}
            e = replace(e, inputs=tuple(factors), outputs=(out,), params=params)
        elif e.outputs[0] in transposed.values():
            continue
        equations.append(e)
    return remove_dead_code(replace(program, equations=tuple(equations)))


def _results_to_transpose(program: Program, source: dict[Variable, Variable]) -> dict[Variable, Variable]:
    """The products that are read only by a transpose, and its results."""
    products = {e.outputs[0] for e in program.equations if _has_flags(e)}
    found = {}
    for out, x in source.items():
        readers = program.readers.get(x, ())
        if x in products and len(readers) == 1 and x not in program.outputs:
            found[x] = out
    return found


def _has_flags(equation: Equation) -> bool:
    return equation.has(Trait.MATMUL) and "transpose_a" in equation.params


def _swaps_matrix_axes(equation: Equation) -> bool:
    """Whether it transposes the matrices along the last two axes."""
    axes = equation.params.get("axes") if equation.primitive.name == "transpose" else None
    return axes is not None and len(axes) > 1 and (*axes[:-2], axes[-1], axes[-2]) == tuple(range(len(axes)))
