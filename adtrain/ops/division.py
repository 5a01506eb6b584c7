"""Rounding to whole numbers, floor division and its remainder, element by element.

The derivatives of rounding and of floor division are 0, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from adtrain.core.array import Value
from adtrain.core.primitive import Primitive
from adtrain.core.trace import bind
from adtrain.ops.broadcasting import broadcast
from adtrain.ops.common import ArrayLike, as_value, elementwise

floor_p: Primitive = elementwise("floor", np.floor, "floor(a)")
ceil_p: Primitive = elementwise("ceil", np.ceil, "ceil(a)")
trunc_p: Primitive = elementwise("trunc", np.trunc, "trunc(a)")
round_p: Primitive = elementwise("round", np.rint, "rint(a)")
floor_divide_p: Primitive = elementwise("floor_divide", np.floor_divide, "floor_divide(a, b)", floating=False)
remainder_p: Primitive = elementwise(
    "remainder",
    np.remainder,
    "floor_remainder(a, b)",
    lambda out, a, b: lambda ct: ct,
    lambda out, a, b: lambda ct: -ct * floor_divide(a, b),
    floating=False,
)


def _rounding(primitive: Primitive, meaning: str) -> Callable[[ArrayLike], Value]:
    def apply(x: ArrayLike) -> Value:
        value = as_value(x)
        return value if value.dtype.kind in "iu" else bind(primitive, value)

    apply.__name__ = apply.__qualname__ = primitive.name
    apply.__doc__ = f"{meaning}, element by element. The derivative is 0. Integers are returned as they are."
    return apply


floor: Callable[[ArrayLike], Value] = _rounding(floor_p, "The largest whole number that is at most x")
ceil: Callable[[ArrayLike], Value] = _rounding(ceil_p, "The smallest whole number that is at least x")
trunc: Callable[[ArrayLike], Value] = _rounding(trunc_p, "x without its fraction")
round: Callable[[ArrayLike], Value] = _rounding(round_p, "The nearest whole number; a half is rounded to the even one")


def floor_divide(a: ArrayLike, b: ArrayLike) -> Value:
    """a // b: the exact quotient rounded down, as in Python and NumPy; 1.0 // 0.1 is 9. The derivative is 0.

    Division by zero gives infinity or NaN for floating-point numbers, and 0 for integers, as in NumPy. One quotient is
    out of range for an integer type: the smallest number by -1. It wraps around to the smallest number.
    """
    return bind(floor_divide_p, *broadcast("floor_divide", a, b))


def remainder(a: ArrayLike, b: ArrayLike) -> Value:
    """a % b = a - b (a // b), with the sign of b, as in Python and NumPy, and as `torch.remainder`.

    Division by zero gives NaN for floating-point numbers, and 0 for integers, as in NumPy. The derivatives are 1 and
    -(a // b).
    """
    return bind(remainder_p, *broadcast("remainder", a, b))
