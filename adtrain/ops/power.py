"""Powers, with a number or an array as exponent."""

from __future__ import annotations

from typing import Any

import numpy as np

from adtrain.core.array import Value
from adtrain.core.primitive import Primitive
from adtrain.core.trace import bind
from adtrain.ops.broadcasting import broadcast, floating
from adtrain.ops.common import ArrayLike, as_value, elementwise
from adtrain.ops.compare import equal, less_equal, where
from adtrain.ops.elementwise import abs, log


def _scalar_vjp(out: Value, x: Value, exponent: float) -> Any:
    if exponent == 0:
        return lambda ct: ct * 0.0
    return lambda ct: ct * (power(x, exponent - 1) * float(exponent))


def _base_vjp(out: Value, a: Value, b: Value) -> Any:
    # b a^(b-1). At b = 0 it is 0, also where a^-1 overflows or a is NaN.
    tiny = float(np.finfo(a.dtype).tiny)
    return lambda ct: ct * b * power(where(equal(b, 0.0), where(less_equal(tiny, abs(a)), a, 1.0), a), b - 1.0)


def _exponent_vjp(out: Value, a: Value, b: Value) -> Any:
    # a^b log a tends to 0 with a for b > 0; a negative base has no derivative in b
    zero = equal(a, 0.0)
    return lambda ct: ct * where(zero, 0.0, out) * log(where(zero, 1.0, a))


def _scalar_reference(x: np.ndarray, exponent: float) -> np.ndarray:
    if exponent == 2:
        return x * x
    return x * x * x if exponent == 3 else np.power(x, x.dtype.type(exponent))


def _scalar_expression(exponent: float) -> str:
    products: dict[float, str] = {0: "(T)1", 1: "a", 2: "a * a", 3: "a * a * a", 0.5: "sqrt(a)"}
    return products.get(exponent, "pow(a, (T){exponent})")


power_p: Primitive = elementwise("power", np.power, "pow(a, b)", _base_vjp, _exponent_vjp)
power_scalar_p: Primitive = elementwise("power_scalar", _scalar_reference, _scalar_expression, _scalar_vjp)


def power(x: ArrayLike, exponent: ArrayLike) -> Value:
    """x ** exponent. A Python number as exponent is part of the operation; an array is differentiated too.

    The derivative with respect to an array exponent is 0 where the base is 0, and NaN where it is negative.
    """
    if isinstance(exponent, (int, float)) and not isinstance(exponent, bool):
        return bind(power_scalar_p, floating(as_value(x)), exponent=exponent)
    a, b = broadcast("power", x, exponent)
    return bind(power_p, floating(a), floating(b))
