"""New arrays: constants, ranges and random numbers.

Random numbers are made by counting: Philox4x32-10 (J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
2011). Number i of a stream is a function of (seed, step, stream, i) and of nothing else, so that every device draws the
same numbers in any order, a replay needs no hidden state, and a resumed run continues with the same numbers.

Normally distributed numbers are made of uniform ones by the inverse of the distribution function. Logarithm, square
root and polynomials compile to vector instructions; the cosine of the Box-Muller method does not. Box-Muller also takes
two uniform numbers for each normal one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Annotated, Any

import numpy as np

from adtrain.core.array import Array, Value, array
from adtrain.core.errors import DTypeError, OptionError, OutOfMemory, ShapeError
from adtrain.core.options import Bounds, checked_options
from adtrain.core.primitive import Primitive, Trait, no_flops
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType, Shape, checked_number, dtype_of
from adtrain.ops import elementwise
from adtrain.ops.common import ArrayLike, as_value
from adtrain.ops.compare import less, where
from adtrain.option_types import Fraction

__all__ = [
    "arange", "dropout", "full", "ones", "ones_like", "random_normal", "random_uniform", "rng_state", "zeros",
    "zeros_like",
]  # fmt: skip

MOST_NUMBERS = 2**60
"""An address has 63 bits, a number 8 bytes."""


def _full_shape(shape: Shape, value: float, dtype: np.dtype, device: str) -> ArrayType:
    if any(length < 0 for length in shape):
        raise ShapeError(f"full: found a negative length in shape {shape}")
    return ArrayType(shape, dtype)


full_p: Primitive = Primitive(
    "full",
    _full_shape,
    lambda shape, value, dtype, device: np.broadcast_to(np.asarray(value, dtype), shape),
    flops=no_flops,
    view=True,
    traits=(Trait.BROADCAST,),
    axes="->*",
)


def full(shape: int | Shape, value: float, dtype: Any = np.float32, device: str = "cpu") -> Value:
    """An array of ``shape`` with ``value`` everywhere.

    Raises:
        ShapeError: a length is negative. DTypeError: ``dtype`` cannot hold ``value``.
    """
    lengths = tuple(map(int, shape)) if isinstance(shape, (tuple, list)) else (int(shape),)
    elements = dtype_of("full", dtype)
    return bind(full_p, shape=lengths, value=checked_number("full", value, elements), dtype=elements, device=device)


def zeros(shape: int | Shape, dtype: Any = np.float32, device: str = "cpu") -> Value:
    """An array of zeros."""
    return full(shape, 0, dtype, device)


def ones(shape: int | Shape, dtype: Any = np.float32, device: str = "cpu") -> Value:
    """An array of ones."""
    return full(shape, 1, dtype, device)


def zeros_like(x: Value) -> Value:
    """Zeros of the shape, dtype and device of ``x``."""
    return full(x.shape, 0, x.dtype, x.device)


def ones_like(x: Value) -> Value:
    """Ones of the shape, dtype and device of ``x``."""
    return full(x.shape, 1, x.dtype, x.device)


def arange(start: float, stop: float | None = None, step: float = 1, dtype: Any = None, device: str = "cpu") -> Array:
    """Evenly spaced numbers, as `numpy.arange`; integers become int64, floats float32.

    Raises:
        OptionError: they are too many, or their number is not finite. OutOfMemory: there is no memory for them.
    """
    first, end = (start, stop) if stop is not None else (0, start)
    if not abs(end - first) < MOST_NUMBERS * abs(step):
        raise OptionError(f"arange: found start {first}, stop {end}, step {step}, expected fewer than 2^60 numbers")
    try:
        numbers = np.arange(first, end, step)
    except MemoryError as error:
        raise OutOfMemory(f"arange: {error}") from None
    if dtype is None:
        dtype = np.float32 if numbers.dtype.kind == "f" else np.int64
    return array(numbers, dtype, device)


_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(counter: Sequence[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """The block cipher: four 32-bit words (as uint64) from a 4-word counter and a 2-word key."""
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0), p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def _uniform_shape(rng: Any, shape: Shape, stream: int, dtype: np.dtype) -> ArrayType:
    return ArrayType((*rng.shape[:-1], *shape), dtype)


def uniform_numbers(rng: np.ndarray, shape: Shape, stream: int, dtype: np.dtype) -> np.ndarray:
    """The numbers of `random_uniform` as a NumPy array."""
    count = math.prod(shape)
    blocks = np.arange(-(-count // 4), dtype=np.uint64)
    out = np.empty((math.prod(rng.shape[:-1]), count), dtype)
    for numbers, state in zip(out, rng.reshape(-1, 4), strict=True):
        seed_low, seed_high, step_low, step_high = (int(word) for word in state)
        step = [np.full_like(blocks, word) for word in (stream, step_low, step_high)]
        words = np.stack(philox([blocks, *step], (seed_low, seed_high)), axis=1).reshape(-1)[:count]
        # 24 bits, so that float32 and float64 hold the same number, and 1 is never reached
        numbers[:] = (words >> np.uint64(8)).astype(dtype) * dtype.type(2.0**-24)
    return out.reshape((*rng.shape[:-1], *shape))


Stream = Annotated[int, Bounds(ge=0, lt=2**32)]
"""The number of a sequence of random numbers."""
_Word64 = Annotated[int, Bounds(ge=0, lt=2**64)]

random_uniform_p: Primitive = Primitive(
    "random_uniform",
    _uniform_shape,
    uniform_numbers,
    flops=no_flops,
    axes=lambda rng, shape, **_: f"*.->*{'.' * len(shape)}",
)
"""Numbers of ``shape`` for each state: (..., 4) to (..., *shape)."""


@checked_options
def rng_state(seed: _Word64, step: _Word64 = 0) -> Array:
    """The state that `random_uniform` and `dropout` take: uint32 (seed low, seed high, step low, step high)."""
    words = [word for number in (seed, step) for word in (number & 0xFFFFFFFF, number >> 32)]
    return array(np.array(words, np.uint32))


@checked_options
def random_uniform(rng: ArrayLike, shape: Sequence[int], stream: Stream = 0, dtype: Any = np.float32) -> Value:
    """Uniform numbers in [0, 1), multiples of 2**-24, the same on every device and in every floating-point type.

    Args:
        rng: uint32 of shape (4,), see `rng_state`.
        stream: selects a sequence that is independent of the other streams of this state; at most 2**32 - 1.

    Raises:
        DTypeError: ``rng`` or ``dtype`` is of another type. OptionError: ``stream`` is out of range.
    """
    return uniform("random_uniform", rng, shape, stream, dtype)


def uniform(name: str, rng: ArrayLike, shape: Sequence[int], stream: int, dtype: Any) -> Value:
    """`random_uniform`, with errors that begin with the operation ``name``."""
    state, lengths, element = checked_state(name, rng), tuple(int(n) for n in shape), dtype_of(name, dtype)
    if element.kind != "f":
        raise DTypeError(f"{name}: found dtype {element}, expected float32 or float64")
    if min(lengths, default=0) < 0:
        raise ShapeError(f"{name}: found shape {lengths}, expected no negative length")
    return bind(random_uniform_p, state, shape=lengths, stream=stream, dtype=element)


def checked_state(name: str, rng: ArrayLike) -> Value:
    """``rng`` as a value. Raises DTypeError unless it is a random state."""
    state = as_value(rng)
    if state.shape != (4,) or state.dtype != np.uint32:
        raise DTypeError(f"{name}: rng is {state.dtype}{list(state.shape)}, expected uint32[4]; see ops.rng_state")
    return state


@checked_options
def dropout(x: ArrayLike, p: Fraction, rng: ArrayLike, stream: Stream = 0) -> Value:
    """Each element 0 with probability ``p``, else divided by 1 - p (N. Srivastava et al., 2014).

    Raises:
        OptionError: ``p`` is not in [0, 1).
    """
    value = as_value(x)
    if p == 0:
        return value
    dropped = less(uniform("dropout", rng, value.shape, stream, np.float32), p)
    return where(dropped, 0.0, value * (1.0 / (1.0 - p)))


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


@checked_options
def random_normal(rng: ArrayLike, shape: Sequence[int], stream: Stream = 0, dtype: Any = np.float32) -> Value:
    """Normally distributed numbers of mean 0 and standard deviation 1, within ± 5.5; ``mean + deviation * ...`` others.

    Args:
        rng: uint32 of shape (4,), see `rng_state`.
        stream: selects a sequence that is independent of the other streams of this state; at most 2**32 - 1.

    Raises:
        DTypeError: ``rng`` or ``dtype`` is of another type. OptionError: ``stream`` is out of range.
    """
    return normal(uniform("random_normal", rng, shape, stream, dtype))


def normal(uniform: Value) -> Value:
    """Numbers of mean 0 and standard deviation 1, within ± 5.5, from uniform multiples of 2**-24 in [0, 1).

    Relative errors are at most 2e-7 in float64 and 2e-6 in float32.
    """
    x = uniform * 2.0 - (1.0 - 2.0**-24)  # symmetric, and never -1 or 1
    w = -elementwise.log((1.0 - x) * (1.0 + x))
    quotient = where(less(w, SPLIT), _polynomial(NEAR, w - 2.5), _polynomial(FAR, elementwise.sqrt(w) - 3.0))
    return quotient * x * math.sqrt(2)


def _polynomial(coefficients: Sequence[float], x: Value) -> Value:
    return reduce(lambda p, c: p * x + c, coefficients[2:], x * coefficients[0] + coefficients[1])
