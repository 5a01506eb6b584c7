"""Activation functions, in forms that neither overflow nor lose digits far from zero."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from adtrain.core.array import Value
from adtrain.core.options import checked_options
from adtrain.core.primitive import Primitive
from adtrain.core.trace import bind
from adtrain.ops.common import ArrayLike, Unary, as_value, elementwise, unary
from adtrain.ops.compare import less, where
from adtrain.ops.elementwise import erf_reference, exp, tanh
from adtrain.option_types import Positive

__all__ = ["elu", "gelu", "leaky_relu", "relu", "sigmoid", "silu", "soft_cap", "softplus", "squared_relu"]

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


@checked_options
def leaky_relu(x: ArrayLike, negative_slope: float = 0.01) -> Value:
    """x where positive, ``negative_slope * x`` elsewhere."""
    return bind(leaky_relu_p, as_value(x), negative_slope=negative_slope)


@checked_options
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
