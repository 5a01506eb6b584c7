"""Powers of real numbers and exact powers of integers, with a number or an array as exponent."""

from __future__ import annotations

from typing import Any

import numpy as np

from adtrain.core.array import Value
from adtrain.core.errors import DTypeError
from adtrain.core.primitive import Primitive
from adtrain.core.trace import bind
from adtrain.core.types import checked_number
from adtrain.ops.broadcasting import broadcast, floating, promote
from adtrain.ops.common import ArrayLike, as_value, elementwise
from adtrain.ops.compare import equal, less_equal, where
from adtrain.ops.elementwise import abs, log


def _scalar_vjp(out: Value, x: Value, exponent: float) -> Any:
    if exponent == 0:
        return lambda ct: ct * 0.0
    return lambda ct: ct * (power(x, exponent - 1) * float(exponent))


def _base_vjp(out: Value, a: Value, b: Value) -> Any:
    # b a^(b-1). At b = 0 it is 0, even if a^-1 overflows or a is NaN.
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


def _integer_reference(x: np.ndarray, exponent: np.ndarray | int) -> np.ndarray:
    """By repeated squaring; products wrap around. The same as integer_power in `kernels/cpu/division.h`."""
    left, factor, out = np.maximum(np.asarray(exponent, np.int64), 0), x, np.ones(np.shape(x), x.dtype)
    while np.any(left):
        out = np.where(left % 2 == 1, out * factor, out)
        left, factor = left // 2, factor * factor
    odd = np.asarray(exponent, np.int64) % 2 == 1
    reciprocal = np.where(x == 1, 1, np.where(x == -1, np.where(odd, -1, 1), 0))
    return np.where(np.less(exponent, 0), reciprocal, out).astype(x.dtype)


integer_power_p: Primitive = elementwise("integer_power", _integer_reference, "integer_power(a, b)", floating=False)
integer_power_scalar_p: Primitive = elementwise(
    "integer_power_scalar", _integer_reference, "integer_power(a, {exponent})", floating=False
)


def power(x: ArrayLike, exponent: ArrayLike) -> Value:
    """x ** exponent. A Python number as exponent is part of the operation; an array is differentiated too.

    The derivative with respect to an array exponent is 0 where the base is 0, and NaN where it is negative.

    Powers of integers with integer exponents are integers of the same type. They are exact, and wrap around. Negative
    exponents in an array give the reciprocal without its fraction, as in PyTorch: 0, unless the base is 1 or -1.

    Raises:
        DTypeError: ``x`` is of integers or bool, and ``exponent`` is a negative Python integer.
    """
    if isinstance(exponent, (int, float)) and not isinstance(exponent, bool):
        value = as_value(x)
        if value.dtype.kind == "f" or isinstance(exponent, float):
            return bind(power_scalar_p, floating(value), exponent=exponent)
        if exponent < 0:
            raise DTypeError(f"power: found exponent {exponent} for {value.dtype}; use {float(exponent)} or astype")
        (base, _) = promote(value, 0)
        return bind(integer_power_scalar_p, base, exponent=checked_number("power", exponent, np.dtype(np.int64)))
    a, b = broadcast("power", x, exponent)
    return bind(power_p if a.dtype.kind == "f" else integer_power_p, a, b)
