"""What candidates must compute: the NumPy reference in float64, of a part of the results where all would take long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from adtrain.core.precision import FULL
from adtrain.core.program import Equation

MAX_FLOPS = 1 << 30
"""Work up to which the reference computes all results."""
PARTS = 4
"""Images, filters or rows of a matrix that it computes of a larger result: the first, the last, and two between."""

Index = tuple[Any, ...]

# By primitive: for each input, and for the output, the axis along which a part of the result depends on the same part
# of that input; None where it depends on all of it.
_AXES: dict[str, tuple[Sequence[int | None], int]] = {
    "conv2d": ((0, None), 0),
    "conv2d_input_grad": ((0, None), 0),
    "conv2d_weight_grad": ((None, 1), 0),
}


def expected(equation: Equation, arrays: Sequence[np.ndarray]) -> tuple[Sequence[np.ndarray], Sequence[Index]]:
    """Right results for the arguments ``arrays``, and where they lie in the equation's outputs."""
    types, params = [v.type for v in equation.inputs], dict(equation.params)
    if "precision" in params:
        params["precision"] = FULL
    large = equation.primitive.cost(types, params).flops > MAX_FLOPS
    axes = _axes(equation) if large else None
    index: Index = ()
    if axes is not None:
        inputs, output = axes
        length = equation.outputs[0].type.shape[output]
        part = sorted({i * (length - 1) // (PARTS - 1) for i in range(PARTS)})
        arrays = [x if axis is None else np.take(x, part, axis) for x, axis in zip(arrays, inputs, strict=True)]
        index = (slice(None),) * output + (part,)
    wide = [x.astype(np.float64) if x.dtype == np.float32 else x for x in arrays]
    with np.errstate(all="ignore"):
        found = equation.primitive.reference(*wide, **params)
    results = [np.asarray(x) for x in (found if isinstance(found, (tuple, list)) else (found,))]
    return results, [index] * len(results)


def _axes(equation: Equation) -> tuple[Sequence[int | None], int] | None:
    params = equation.params
    if equation.primitive.name == "matmul":
        ndim = len(equation.inputs[0].type.shape)
        return (ndim - (1 if params["transpose_a"] else 2), None), ndim - 2
    if "window" in params and params["window"].groups > 1:
        return None
    return _AXES.get(equation.primitive.name)
