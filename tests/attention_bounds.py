"""What attention by WGMMA has to compute, and how far it may be off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from adtrain.backends.cuda.narrow_values import ARRAYS, in_bfloat16, narrowed
from adtrain.core.primitive import Primitive
from adtrain.core.program import Equation, Variable
from adtrain.core.types import ArrayType
from adtrain.lowering.cuda.attention.problem import Problem, problem_of
from adtrain.ops.channels_last import from_bfloat16_p, to_bfloat16_p

TOLERANCE = {"bfloat16": 1e-2, "full": 2e-6}
"""Of the norm, by precision. Operands have 8 or 22 significant bits."""


def exact_results(
    primitive: Primitive, arrays: Sequence[np.ndarray], params: Mapping[str, Any]
) -> list[tuple[np.ndarray, float]]:
    """The results for float64 arrays, and the largest norm of the error of each.

    That is TOLERANCE of its norm, or twice the error of NumPy's form in this precision if that is larger:
    few products may cancel.
    """

    def results(*given: np.ndarray, precision: str) -> tuple[np.ndarray, ...]:
        found = primitive.reference(*given, **{**params, "precision": precision})
        return found if isinstance(found, tuple) else (found,)

    exact = results(*arrays, precision="full")
    rounded = results(*(x.astype(np.float32) for x in arrays), precision=params["precision"])
    least = TOLERANCE[params["precision"]]
    bounds = (max(least * np.linalg.norm(x), 2 * np.linalg.norm(y - x)) for x, y in zip(exact, rounded, strict=True))
    return [(x, float(bound)) for x, bound in zip(exact, bounds, strict=True)]


def wgmma_sample(
    primitive: Primitive, count: int, arrays: Sequence[np.ndarray], params: dict[str, Any], stored: bool
) -> tuple[Equation, Problem, list[np.ndarray], list[tuple[np.ndarray, float]]]:
    """An equation of attention, its problem, its arguments, and its `exact_results`.

    Args:
        count: the arguments that hold q, k and v.
        stored: whether the arrays are bfloat16 in memory.
    """
    given = [x.astype(np.float32) for x in arrays]
    types = [ArrayType(x.shape, x.dtype) for x in given]
    outputs = tuple(Variable(t, "gpu") for t in primitive.output_types(types, params))
    equation = Equation(primitive, tuple(Variable(t, "gpu") for t in types), params, outputs)
    problem = problem_of(count, "grad" in primitive.name, types, params)._replace(stored=stored)
    if stored:
        inputs, results = ARRAYS[primitive.name]
        converted = [*(equation.inputs[i] for i in inputs), *(outputs[i] for i in results)]
        equation = in_bfloat16(equation, {v: v.like(narrowed(v.type)) for v in converted})
        given = [to_bfloat16_p.reference(x) if i in inputs else x for i, x in enumerate(given)]
        arrays = [from_bfloat16_p.reference(x) if i in inputs else arrays[i] for i, x in enumerate(given)]
    return equation, problem, given, exact_results(primitive, [x.astype(np.float64) for x in arrays], params)
