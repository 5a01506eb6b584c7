"""Arithmetic and the elementary functions, element by element with broadcasting.

A Python number takes the dtype of the arrays that it is combined with. A number alone is float32: `log(3.7)`. For
float64, use `math.log` or an array.

Integers keep their type and wrap around, as in NumPy and PyTorch. For two bool, `+` and `maximum` are "or", `*` and
`minimum` are "and", and `-` is refused. With a number, bool is 0 or 1 of the number's type.

Each primitive is a line: its name, its NumPy function, its C expression, and for each argument its vjp rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from adtrain.core.array import Value
from adtrain.core.primitive import Primitive, Trait
from adtrain.core.trace import bind
from adtrain.core.traced_number import TracedNumber
from adtrain.core.types import dtype_of
from adtrain.ops.broadcasting import astype_p, broadcast, floating
from adtrain.ops.common import ArrayLike, as_value, elementwise
from adtrain.ops.erf import erf_reference

__all__ = [
    "abs",
    "add",
    "arctan2",
    "astype",
    "cos",
    "div",
    "erf",
    "exp",
    "expm1",
    "hypot",
    "log",
    "log1p",
    "mul",
    "neg",
    "reciprocal",
    "rsqrt",
    "sign",
    "sin",
    "sqrt",
    "square",
    "stop_gradient",
    "sub",
    "tanh",
]

add_p: Primitive = elementwise(
    "add",
    np.add,
    "a + b",
    lambda out, a, b: lambda ct: ct,
    lambda out, a, b: lambda ct: ct,
    floating=False,
    instead_of_bool=None,
    traits=(Trait.LINEAR,),
)
sub_p: Primitive = elementwise(
    "sub",
    np.subtract,
    "a - b",
    lambda out, a, b: lambda ct: ct,
    lambda out, a, b: lambda ct: -ct,
    floating=False,
    instead_of_bool="use astype, or not_equal for exclusive or",
    traits=(Trait.LINEAR,),
)
mul_p: Primitive = elementwise(
    "mul",
    np.multiply,
    "a * b",
    lambda out, a, b: lambda ct: ct * b,
    lambda out, a, b: lambda ct: ct * a,
    floating=False,
    instead_of_bool=None,
    traits=(Trait.BILINEAR,),
)


def _quotient_taylor(trace: Any, k: int, out: Value, a: Value, b: Value) -> Value | None:
    """Leibniz' rule for a = b out, solved for the last coefficient of out."""
    products = trace.leibniz(mul, b, out, k, first=1)
    rest = trace.total((trace.coefficient(a, k), None if products is None else -products), k)
    return None if rest is None else rest / trace.lower(b)


div_p: Primitive = elementwise(
    "div",
    np.divide,
    "a / b",
    lambda out, a, b: lambda ct: ct / b,
    lambda out, a, b: lambda ct: -(ct * out / b),
    taylor=_quotient_taylor,
)
neg_p: Primitive = elementwise(
    "neg",
    np.negative,
    "-a",
    lambda out, x: lambda ct: -ct,
    floating=False,
    instead_of_bool="use astype, or equal(x, False) for not",
    traits=(Trait.LINEAR,),
)

exp_p: Primitive = elementwise("exp", np.exp, "exp(a)", lambda out, x: lambda ct: ct * out)
log_p: Primitive = elementwise("log", np.log, "log(a)", lambda out, x: lambda ct: ct / x)
log1p_p: Primitive = elementwise("log1p", np.log1p, "log1p(a)", lambda out, x: lambda ct: ct / (x + 1.0))
expm1_p: Primitive = elementwise("expm1", np.expm1, "expm1(a)", lambda out, x: lambda ct: ct * (out + 1.0))
sqrt_p: Primitive = elementwise("sqrt", np.sqrt, "sqrt(a)", lambda out, x: lambda ct: ct * 0.5 / out)
rsqrt_p: Primitive = elementwise(
    "rsqrt", lambda x: 1.0 / np.sqrt(x), "1 / sqrt(a)", lambda out, x: lambda ct: ct * -0.5 * (out * out * out)
)
reciprocal_p: Primitive = elementwise("reciprocal", np.reciprocal, "1 / a", lambda out, x: lambda ct: -ct * (out * out))
square_p: Primitive = elementwise(
    "square",
    np.square,
    "a * a",
    lambda out, x: lambda ct: ct * (x * 2.0),
    floating=False,
    taylor=lambda trace, k, out, x: trace.leibniz(mul, x, x, k, symmetric=True),
)
abs_p: Primitive = elementwise(
    "abs", np.abs, "a > 0 ? a : 0 - a", lambda out, x: lambda ct: ct * sign(x), floating=False
)
sign_p: Primitive = elementwise("sign", np.sign, "a > 0 ? (T)1 : a < 0 ? (T)-1 : a == 0 ? (T)0 : a", floating=False)
sin_p: Primitive = elementwise("sin", np.sin, "sin(a)", lambda out, x: lambda ct: ct * cos(x))
cos_p: Primitive = elementwise("cos", np.cos, "cos(a)", lambda out, x: lambda ct: -ct * sin(x))
tanh_p: Primitive = elementwise("tanh", np.tanh, "tanh(a)", lambda out, x: lambda ct: ct * (1.0 - out * out))
erf_p: Primitive = elementwise(
    "erf", erf_reference, "erf(a)", lambda out, x: lambda ct: ct * (2.0 / math.sqrt(math.pi)) * exp(-(x * x))
)
arctan2_p: Primitive = elementwise(
    "arctan2",
    np.arctan2,
    "atan2(a, b)",
    lambda out, a, b: _arctan2_pullback(a, b, b),
    lambda out, a, b: _arctan2_pullback(a, b, -a),
)
hypot_p: Primitive = elementwise(
    "hypot",
    np.hypot,
    "hypot(a, b)",
    lambda out, a, b: lambda ct: ct * (a / out),
    lambda out, a, b: lambda ct: ct * (b / out),
)
stop_gradient_p: Primitive = elementwise("stop_gradient", lambda x: x, "a", floating=False)


def add(a: ArrayLike, b: ArrayLike) -> Value:
    """a + b."""
    return bind(add_p, *broadcast("add", a, b))


def sub(a: ArrayLike, b: ArrayLike) -> Value:
    """a - b."""
    return bind(sub_p, *broadcast("sub", a, b))


def mul(a: ArrayLike, b: ArrayLike) -> Value:
    """a * b."""
    return bind(mul_p, *broadcast("mul", a, b))


def div(a: ArrayLike, b: ArrayLike) -> Value:
    """a / b; integers are divided as float32."""
    a, b = broadcast("div", a, b)
    return bind(div_p, floating(a), floating(b))


def _arctan2_pullback(a: Value, b: Value, numerator: Value) -> Any:
    """Multiplies by numerator / (a^2 + b^2). The squares may overflow or underflow; their root, hypot, does not."""
    radius = hypot(a, b)
    radius = radius + (1.0 - sign(radius))  # 1 at (0, 0), where the numerator is 0
    return lambda ct: ct * (numerator / radius / radius)


def arctan2(a: ArrayLike, b: ArrayLike) -> Value:
    """The angle of the point (b, a) in radians, from -pi to pi: the arctangent of a / b in the quadrant of the point.

    Integers are converted to float32. The derivatives at (0, 0) are 0, as in PyTorch.
    """
    a, b = broadcast("arctan2", a, b)
    return bind(arctan2_p, floating(a), floating(b))


def hypot(a: ArrayLike, b: ArrayLike) -> Value:
    """sqrt(a^2 + b^2) without overflow or underflow; integers are converted to float32.

    The derivatives at (0, 0) are NaN.
    """
    a, b = broadcast("hypot", a, b)
    return bind(hypot_p, floating(a), floating(b))


def neg(x: ArrayLike) -> Value:
    """-x."""
    return bind(neg_p, as_value(x))


def _unary(primitive: Primitive, formula: str) -> Callable[[ArrayLike], Value]:
    def apply(x: ArrayLike) -> Value:
        return bind(primitive, as_value(x))

    apply.__name__ = apply.__qualname__ = primitive.name
    apply.__doc__ = f"{formula}, element by element."
    return apply


exp: Callable[[ArrayLike], Value] = _unary(exp_p, "e^x")
log: Callable[[ArrayLike], Value] = _unary(log_p, "Natural logarithm")
log1p: Callable[[ArrayLike], Value] = _unary(log1p_p, "log(1 + x), exact for small x")
expm1: Callable[[ArrayLike], Value] = _unary(expm1_p, "e^x - 1, exact for small x")
sqrt: Callable[[ArrayLike], Value] = _unary(sqrt_p, "Square root")
rsqrt: Callable[[ArrayLike], Value] = _unary(rsqrt_p, "1 / sqrt(x)")
reciprocal: Callable[[ArrayLike], Value] = _unary(reciprocal_p, "1 / x")
square: Callable[[ArrayLike], Value] = _unary(square_p, "x * x")
abs: Callable[[ArrayLike], Value] = _unary(abs_p, "|x|, with derivative 0 at 0")
sign: Callable[[ArrayLike], Value] = _unary(sign_p, "-1, 0 or 1; its derivative is 0")
sin: Callable[[ArrayLike], Value] = _unary(sin_p, "Sine of radians")
cos: Callable[[ArrayLike], Value] = _unary(cos_p, "Cosine of radians")
tanh: Callable[[ArrayLike], Value] = _unary(tanh_p, "Hyperbolic tangent")
erf: Callable[[ArrayLike], Value] = _unary(erf_p, "Error function")
stop_gradient: Callable[[ArrayLike], Value] = _unary(stop_gradient_p, "x as a constant, with derivative 0")


def astype(x: ArrayLike, dtype: Any) -> Value:
    """The elements converted to ``dtype``; a conversion between floating-point types is differentiable."""
    wanted = dtype_of("astype", dtype)
    value = x.value if isinstance(x, TracedNumber) else as_value(x)
    return value if value.dtype == wanted else bind(astype_p, value, dtype=wanted)
