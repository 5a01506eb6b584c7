"""Arithmetic, powers, elementary functions, rounding and bitwise operations, element by element with broadcasting; and
activation functions, in forms that neither overflow nor lose digits far from zero.

A Python number takes the dtype of the arrays that it is combined with. A number alone is float32: `log(3.7)`. For
float64, use `math.log` or an array.

Integers keep their type and wrap around, as in NumPy and PyTorch. For two bool, `+` and `maximum` are "or", `*` and
`minimum` are "and", and `-` is refused. With a number, bool is 0 or 1 of the number's type.

Each primitive is a line: its name, its NumPy function, its C expression, and for each argument its vjp rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from adtrain.core.array import TracedNumber, Value
from adtrain.core.errors import DTypeError
from adtrain.core.options import checked_options
from adtrain.core.primitive import Primitive, Trait
from adtrain.core.trace import bind
from adtrain.core.types import checked_number, dtype_of
from adtrain.ops.common import (
    ArrayLike,
    Binary,
    Unary,
    as_value,
    astype_p,
    binary,
    broadcast,
    elementwise,
    floating,
    named,
    promote,
    unary,
)
from adtrain.ops.compare import equal, less, less_equal, where
from adtrain.option_types import Positive

__all__ = [
    "abs", "add", "arctan2", "astype", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "cos", "div",
    "elu", "erf", "exp", "expm1", "floor", "floor_divide", "gelu", "hypot", "leaky_relu", "log", "log1p", "mul", "neg",
    "power", "reciprocal", "relu", "remainder", "round", "rsqrt", "sigmoid", "sign", "silu", "sin", "soft_cap",
    "softplus", "sqrt", "square", "squared_relu", "stop_gradient", "sub", "tanh", "trunc",
]  # fmt: skip

# Rational Chebyshev approximations of W. J. Cody, "Rational Chebyshev approximations for the error function",
# Mathematics of Computation 23 (1969): erf itself for |x| < 0.46875, erfc on [0.46875, 4] and above 4; relative error
# about 1e-16 in float64. Numerators and denominators, highest power first; denominators are monic.
_SMALL = (
    (1.85777706184603153e-1, 3.16112374387056560, 1.13864154151050156e2, 3.77485237685302021e2, 3.20937758913846947e3),
    (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3),
)
_MIDDLE = (
    (
        2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594, 6.61191906371416295e1,
        2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3,
        1.23033935479799725e3,
    ),
    (
        1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
        3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3,
    ),
)  # fmt: skip
_LARGE = (
    (
        1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1, 1.25781726111229246e-1,
        1.60837851487422766e-2, 6.58749161529837803e-4,
    ),
    (
        1.0, 2.56852019228982242, 1.87295284992346047, 5.27905102951428412e-1, 6.05183413124413191e-2,
        2.33520497626869185e-3,
    ),
)  # fmt: skip


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: np.ndarray) -> np.ndarray:
    return np.polyval(coefficients[0], x) / np.polyval(coefficients[1], x)


def erf_reference(x: np.ndarray) -> np.ndarray:
    """erf(x) in the dtype of ``x``, computed in float64."""
    z = x.astype(np.float64)
    y = np.minimum(np.abs(z), 6.0)  # erf is 1 to the last bit beyond
    small = z * _ratio(_SMALL, np.minimum(y, 0.5) ** 2)
    middle = _ratio(_MIDDLE, np.clip(y, 0.4, 4.0))
    far = np.maximum(y, 4.0)
    inverse = 1.0 / (far * far)
    large = (1.0 / math.sqrt(math.pi) - inverse * _ratio(_LARGE, inverse)) / far
    tail = 1.0 - np.exp(-y * y) * np.where(y <= 4.0, middle, large)
    return np.where(y < 0.46875, small, np.copysign(tail, z)).astype(x.dtype)


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


add: Binary = binary(add_p, "a + b.")
sub: Binary = binary(sub_p, "a - b.")
mul: Binary = binary(mul_p, "a * b.")


def _broadcast_floats(name: str, a: ArrayLike, b: ArrayLike) -> Iterable[Value]:
    return map(floating, broadcast(name, a, b))


div: Binary = binary(div_p, "a / b; integers are divided as float32.", _broadcast_floats)


def _arctan2_pullback(a: Value, b: Value, numerator: Value) -> Any:
    """Multiplies by numerator / (a^2 + b^2). The squares may overflow or underflow; their root, hypot, does not."""
    radius = hypot(a, b)
    radius = radius + (1.0 - sign(radius))  # 1 at (0, 0), where the numerator is 0
    return lambda ct: ct * (numerator / radius / radius)


def arctan2(a: ArrayLike, b: ArrayLike) -> Value:
    """The angle of the point (b, a) in radians, from -pi to pi: the arctangent of a / b in the quadrant of the point.

    Integers are converted to float32. The derivatives at (0, 0) are 0, as in PyTorch.
    """
    return bind(arctan2_p, *_broadcast_floats("arctan2", a, b))


def hypot(a: ArrayLike, b: ArrayLike) -> Value:
    """sqrt(a^2 + b^2) without overflow or underflow; integers are converted to float32.

    The derivatives at (0, 0) are NaN.
    """
    return bind(hypot_p, *_broadcast_floats("hypot", a, b))


neg: Unary = unary(neg_p, "-x")
exp: Unary = unary(exp_p, "e^x")
log: Unary = unary(log_p, "Natural logarithm")
log1p: Unary = unary(log1p_p, "log(1 + x), exact for small x")
expm1: Unary = unary(expm1_p, "e^x - 1, exact for small x")
sqrt: Unary = unary(sqrt_p, "Square root")
rsqrt: Unary = unary(rsqrt_p, "1 / sqrt(x)")
reciprocal: Unary = unary(reciprocal_p, "1 / x")
square: Unary = unary(square_p, "x * x")
abs: Unary = unary(abs_p, "|x|, with derivative 0 at 0")
sign: Unary = unary(sign_p, "-1, 0 or 1; its derivative is 0")
sin: Unary = unary(sin_p, "Sine of radians")
cos: Unary = unary(cos_p, "Cosine of radians")
tanh: Unary = unary(tanh_p, "Hyperbolic tangent")
erf: Unary = unary(erf_p, "Error function")
stop_gradient: Unary = unary(stop_gradient_p, "x as a constant, with derivative 0")


def astype(x: ArrayLike, dtype: Any) -> Value:
    """The elements converted to ``dtype``; a conversion between floating-point types is differentiable."""
    wanted = dtype_of("astype", dtype)
    value = x.value if isinstance(x, TracedNumber) else as_value(x)
    return value if value.dtype == wanted else bind(astype_p, value, dtype=wanted)


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


def _rounding(primitive: Primitive, meaning: str) -> Unary:
    def apply(x: ArrayLike) -> Value:
        value = as_value(x)
        return value if value.dtype.kind in "iu" else bind(primitive, value)

    doc = f"{meaning}, element by element. The derivative is 0. Integers are returned as they are."
    return named(apply, primitive.name, doc)


floor: Unary = _rounding(floor_p, "The largest whole number that is at most x")
ceil: Unary = _rounding(ceil_p, "The smallest whole number that is at least x")
trunc: Unary = _rounding(trunc_p, "x without its fraction")
round: Unary = _rounding(round_p, "The nearest whole number; a half is rounded to the even one")


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
    """Powers by repeated squaring; products wrap around. The same as integer_power in `kernels/cpu/division.h`."""
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


def _bitwise(name: str, symbol: str) -> Primitive:
    reference = getattr(np, name)
    return elementwise(name, reference, f"a {symbol} b", None, None, floating=False, instead_of_bool=None)


bitwise_and_p: Primitive = _bitwise("bitwise_and", "&")
bitwise_or_p: Primitive = _bitwise("bitwise_or", "|")
bitwise_xor_p: Primitive = _bitwise("bitwise_xor", "^")


def _bits(name: str, a: ArrayLike, b: ArrayLike) -> list[Value]:
    """`broadcast` of integers or bool."""
    values = broadcast(name, a, b)
    if values[0].dtype.kind == "f":
        raise DTypeError(f"{name}: found {values[0].dtype}, expected integers or bool; compare or use astype")
    return values


bitwise_and: Binary = binary(bitwise_and_p, "a & b. Raises DTypeError for floating-point numbers.", _bits)
bitwise_or: Binary = binary(bitwise_or_p, "a | b. Raises DTypeError for floating-point numbers.", _bits)
bitwise_xor: Binary = binary(bitwise_xor_p, "a ^ b. Raises DTypeError for floating-point numbers.", _bits)


def bitwise_not(x: ArrayLike) -> Value:
    """~x: of bool not x, of integers all bits turned. Raises DTypeError for floating-point numbers."""
    value = as_value(x)
    if value.dtype.kind == "f":
        raise DTypeError(f"bitwise_not: found {value.dtype}, expected integers or bool; compare or use astype")
    ones = True if value.dtype == np.bool_ else -1 if value.dtype.kind == "i" else int(np.iinfo(value.dtype).max)
    return bitwise_xor(value, ones)


_SQRT_HALF = math.sqrt(0.5)
_DENSITY_AT_0 = 1 / math.sqrt(2 * math.pi)
"""The density of the standard normal distribution at 0."""


def _sigmoid_reference(x: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(x))  # in (0, 1], so nothing overflows
    return np.where(x >= 0, x.dtype.type(1), small) / (1 + small)


def _gelu_reference(x: np.ndarray) -> np.ndarray:
    return x * ((1 + erf_reference(x * _SQRT_HALF)) * x.dtype.type(0.5))


def _silu_vjp(out: Value, x: Value) -> Any:
    def pullback(ct: Value) -> Value:
        s = sigmoid(x)
        return ct * s * (1.0 + x * (1.0 - s))

    return pullback


def _gelu_derivative_reference(x: np.ndarray) -> np.ndarray:
    density = np.exp(x * x * x.dtype.type(-0.5)) * x.dtype.type(_DENSITY_AT_0)
    return (1 + erf_reference(x * _SQRT_HALF)) * x.dtype.type(0.5) + x * density


def _gelu_derivative_vjp(out: Value, x: Value) -> Any:
    def pullback(ct: Value) -> Value:
        density = exp(x * x * -0.5) * _DENSITY_AT_0
        return ct * (density * 2.0 - x * (x * density))  # finite where x * x is not

    return pullback


relu_p: Primitive = elementwise(
    "relu",
    lambda x: np.maximum(x, x.dtype.type(0)),
    "a < 0 ? (T)0 : a",
    # the output is positive exactly where the input is, and the next layer keeps the output in memory anyway
    lambda out, x: lambda ct: where(less(0.0, out), ct, 0.0),
)
leaky_relu_p: Primitive = elementwise(
    "leaky_relu",
    lambda x, negative_slope: np.where(x > 0, x, x * x.dtype.type(negative_slope)),
    "a > 0 ? a : a * (T){negative_slope}",
    lambda out, x, negative_slope: lambda ct: where(less(0.0, x), ct, ct * negative_slope),
)
elu_p: Primitive = elementwise(
    "elu",
    lambda x, alpha: np.where(x > 0, x, np.expm1(np.minimum(x, 0)) * x.dtype.type(alpha)),
    "a > 0 ? a : expm1(a) * (T){alpha}",
    lambda out, x, alpha: lambda ct: where(less(0.0, x), ct, ct * (out + alpha)),
)
sigmoid_p: Primitive = elementwise(
    "sigmoid", _sigmoid_reference, "1 / (1 + exp(-a))", lambda out, x: lambda ct: ct * (out * (1.0 - out))
)
softplus_p: Primitive = elementwise(
    "softplus",
    lambda x: np.maximum(x, x.dtype.type(0)) + np.log1p(np.exp(-np.abs(x))),
    "(a > 0 ? a : (T)0) + log1p(exp(-fabs(a)))",
    lambda out, x: lambda ct: ct * sigmoid(x),
)
silu_p: Primitive = elementwise("silu", lambda x: x * _sigmoid_reference(x), "a / (1 + exp(-a))", _silu_vjp)
gelu_p: Primitive = elementwise(
    "gelu", _gelu_reference, "a * normal_cdf(a)", lambda out, x: lambda ct: ct * bind(gelu_derivative_p, x)
)
gelu_derivative_p: Primitive = elementwise(
    "gelu_derivative",
    _gelu_derivative_reference,
    "normal_cdf(a) + a * normal_pdf(a)",
    _gelu_derivative_vjp,
)


relu: Unary = unary(relu_p, "max(x, 0), with derivative 0 at 0")


def squared_relu(x: ArrayLike) -> Value:
    """max(x, 0)² (D. So et al., "Primer", 2021)."""
    y = relu(x)
    return y * y


@checked_options
def soft_cap(x: ArrayLike, cap: Positive) -> Value:
    """cap tanh(x / cap): x near 0, and never beyond ±cap (Gemma 2, 2024).

    Raises:
        OptionError: ``cap`` is not a number above 0.
    """
    return tanh(as_value(x) * (1 / cap)) * cap


def leaky_relu(x: ArrayLike, negative_slope: float = 0.01) -> Value:
    """x where positive, ``negative_slope * x`` elsewhere."""
    return bind(leaky_relu_p, as_value(x), negative_slope=negative_slope)


def elu(x: ArrayLike, alpha: float = 1.0) -> Value:
    """x where positive, ``alpha * (e^x - 1)`` elsewhere."""
    return bind(elu_p, as_value(x), alpha=alpha)


sigmoid: Unary = unary(sigmoid_p, "1 / (1 + e^-x)")
softplus: Unary = unary(softplus_p, "log(1 + e^x)")
silu: Unary = unary(silu_p, "x * sigmoid(x) (S. Elfwing et al., 2018; also called swish)")


@checked_options
def gelu(x: ArrayLike, approximate: Literal["none", "tanh"] = "none") -> Value:
    """x times the normal distribution function of x (D. Hendrycks, K. Gimpel, 2016).

    Args:
        approximate: ``"none"``, or ``"tanh"`` for the paper's approximation by a hyperbolic tangent.
    """
    x = as_value(x)
    if approximate == "none":
        return bind(gelu_p, x)
    return x * 0.5 * (tanh((x + x * x * x * 0.044715) * math.sqrt(2.0 / math.pi)) + 1.0)
