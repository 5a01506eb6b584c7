"""Normally distributed numbers from uniform ones, by the inverse of the distribution function.

Logarithm, square root and polynomials compile to vector instructions; the cosine of the Box-Muller method does not.
Box-Muller also takes two uniform numbers for each normal one. With it, noise took five times as long on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import sqrt
from typing import Any

import numpy as np

from adtrain.core.array import Value
from adtrain.ops import elementwise
from adtrain.ops.common import ArrayLike
from adtrain.ops.compare import less, where
from adtrain.ops.random import uniform

# M. Giles, "Approximating the erfinv function", GPU Computing Gems Jade Edition, 2011, table 5. With
# w = -log((1 - x) (1 + x)), erfinv(x) / x is the polynomial NEAR of w - 2.5 for w < SPLIT, and FAR of sqrt(w) - 3
# otherwise; highest power first.
SPLIT = 5.0
NEAR = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
    -0.00125372503, -0.00417768164, 0.246640727, 1.50140941,
)  # fmt: skip
FAR = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
    -0.0076224613, 0.00943887047, 1.00167406, 2.83297682,
)  # fmt: skip


def random_normal(rng: ArrayLike, shape: Sequence[int], stream: int = 0, dtype: Any = np.float32) -> Value:
    """Normally distributed numbers of mean 0 and standard deviation 1, within ± 5.5; ``mean + deviation * ...`` others.

    Args:
        rng: uint32 of shape (4,), see `rng_state`.
        stream: selects a sequence that is independent of the other streams of this state; at most 2**32 - 1.

    Raises:
        DTypeError: ``rng`` or ``dtype`` is of another type. ShapeError: ``stream`` is out of range.
    """
    return normal(uniform("random_normal", rng, shape, stream, dtype))


def normal(uniform: Value) -> Value:
    """Numbers of mean 0 and standard deviation 1, within ± 5.5, from uniform multiples of 2**-24 in [0, 1).

    Relative errors are at most 2e-7 in float64 and 2e-6 in float32.
    """
    x = uniform * 2.0 - (1.0 - 2.0**-24)  # symmetric, and never -1 or 1
    w = -elementwise.log((1.0 - x) * (1.0 + x))
    quotient = where(less(w, SPLIT), _polynomial(NEAR, w - 2.5), _polynomial(FAR, elementwise.sqrt(w) - 3.0))
    return quotient * x * sqrt(2)


def _polynomial(coefficients: Sequence[float], x: Value) -> Value:
    return reduce(lambda p, c: p * x + c, coefficients[2:], x * coefficients[0] + coefficients[1])
