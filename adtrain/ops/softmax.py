"""softmax and its logarithm, shifted by the maximum so that nothing overflows."""

from __future__ import annotations

from typing import Any

import numpy as np

from adtrain.core.array import Value
from adtrain.core.axes import along
from adtrain.core.errors import ShapeError
from adtrain.core.primitive import Primitive
from adtrain.core.types import ArrayType
from adtrain.ops.broadcasting import accurate_sum, along_axis
from adtrain.ops.common import ArrayLike, require_float
from adtrain.ops.elementwise import exp
from adtrain.ops.reduce import sum


def _shape(x: Any, axis: int) -> ArrayType:
    require_float("softmax", x)
    if x.shape[axis] == 0:
        raise ShapeError(f"softmax: shape {x.shape} has no elements along axis {axis}")
    return ArrayType(x.shape, x.dtype)


def _softmax_reference(x: np.ndarray, axis: int) -> np.ndarray:
    powers = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return powers / accurate_sum(powers, (axis,), keepdims=True)


def _log_softmax_reference(x: np.ndarray, axis: int) -> np.ndarray:
    shifted = x - np.max(x, axis=axis, keepdims=True)
    return shifted - np.log(accurate_sum(np.exp(shifted), (axis,), keepdims=True))


def _flops(x: Any, axis: int) -> int:
    return 5 * x.size


softmax_p: Primitive = Primitive(
    "softmax",
    _shape,
    _softmax_reference,
    [lambda out, x, axis: lambda ct: out * (ct - sum(ct * out, axis, keepdims=True))],
    _flops,
    axes=lambda x, axis: along(x.ndim, (axis,)),
)
log_softmax_p: Primitive = Primitive(
    "log_softmax",
    _shape,
    _log_softmax_reference,
    [lambda out, x, axis: lambda ct: ct - exp(out) * sum(ct, axis, keepdims=True)],
    _flops,
    axes=lambda x, axis: along(x.ndim, (axis,)),
)


def softmax(x: ArrayLike, axis: int = -1) -> Value:
    """exp(x) / sum(exp(x)) along ``axis``.

    Raises:
        ShapeError: there are no elements along ``axis``. DTypeError: ``x`` is not floating point.
    """
    return along_axis("softmax", softmax_p, x, axis)


def log_softmax(x: ArrayLike, axis: int = -1) -> Value:
    """x - log(sum(exp(x))) along ``axis``; errors as `softmax`."""
    return along_axis("log_softmax", log_softmax_p, x, axis)
