"""Arguments to measure candidates on, and the right results: the NumPy reference in float64. No GPU is needed.

Where the reference would take long it computes a part of the results.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from adtrain.backends.cuda.tuner.measure import described
from adtrain.core.precision import FULL, TERMS, TF32
from adtrain.core.primitive import PRIMITIVES, Trait
from adtrain.core.program import Equation
from adtrain.core.types import BITS, ArrayType

PERIOD = 1048573
"""Random elements drawn for one argument; a larger argument repeats them. A prime, so that rows differ."""

GRADIENT_SCALE, GRADIENT_SPREAD, GRADIENT_ZEROS = 1e-6, 2.0, 0.5
"""Gradient-like elements: median magnitude, standard deviation of its logarithm, and share of zeros (as after a relu).
Most are below 6e-5, the smallest normal fp16 number."""

MAX_FLOPS = 1 << 30
"""Work up to which the reference computes all results."""
PARTS = 4
"""The number of images, filters or matrix rows of a larger result that it computes: the first, the last, and two
between."""

Index = tuple[Any, ...]

# By primitive: for each input, and for the output, the axis along which a part of the result depends on the same part
# of that input; None where it depends on all of it.
_AXES: dict[str, tuple[Sequence[int | None], int]] = {
    "conv2d": ((0, None), 0),
    "conv2d_input_grad": ((0, None), 0),
    "conv2d_weight_grad": ((None, 1), 0),
    "conv2d_weight_grad_by_image": ((0, 0), 0),
}
for _format, _count in TERMS.items():
    _AXES[f"conv2d_{_format}"] = (None,) * _count + (0,) * _count, 1
    _AXES[f"conv2d_input_grad_{_format}"] = (None,) * _count + (0 if _format == TF32 else 3,) * _count, 1
    _AXES[f"conv2d_weight_grad_{_format}"] = (None,) * _count + (3,) * _count, 0


def arguments(equation: Equation, gradients: bool) -> list[np.ndarray]:
    """Random arguments, the same ones each time.

    Args:
        gradients: floats have the scale, spread and zeros of gradients; otherwise they are normal.
    """
    rng = np.random.default_rng(zlib.crc32(described(equation).encode()) + gradients)
    count = TERMS.get(equation.params.get("precision", FULL), 1)
    if count == 1:
        return [_drawn(rng, v.type, _index_limit(equation), gradients) for v in equation.inputs]
    types = [v.type._replace(dtype=np.dtype(np.float32)) for v in equation.inputs[::count]]
    return [term for t in types for term in terms_of(_drawn(rng, t, 0, gradients), count)]


def terms_of(x: np.ndarray, count: int) -> list[np.ndarray]:
    """The terms of bfloat16 whose sum is a float32 operand."""
    to_bits, rest = PRIMITIVES["to_bfloat16"].reference, PRIMITIVES["bfloat16_rest"].reference
    found = [to_bits(x)]
    while len(found) < count:
        x = rest(x, found[-1])
        found.append(to_bits(x))
    return found


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
    results = [widened(np.asarray(x)) for x in (found if isinstance(found, (tuple, list)) else (found,))]
    return results, [index] * len(results)


def widened(x: np.ndarray) -> np.ndarray:
    """Elements of bfloat16 as float32 numbers; another array as it is."""
    found: np.ndarray = PRIMITIVES["from_bfloat16"].reference(x) if x.dtype == BITS else x
    return found


def _axes(equation: Equation) -> tuple[Sequence[int | None], int] | None:
    params = equation.params
    if equation.has(Trait.MATMUL) and "transpose_a" in params:
        ndim = len(equation.inputs[0].type.shape)
        return (ndim - (1 if params["transpose_a"] else 2), None), ndim - 2
    if "window" in params and params["window"].groups > 1:
        return None
    return _AXES.get(equation.primitive.name)


def _drawn(rng: np.random.Generator, type_: ArrayType, limit: int, gradients: bool) -> np.ndarray:
    """Random elements: floats are normal, or like gradients; integers are from 0 to below ``limit``. Elements of uint16
    are the bits of bfloat16."""
    if type_.dtype == BITS:
        bits = _drawn(rng, type_._replace(dtype=np.dtype(np.float32)), limit, gradients).view(np.uint32)
        return (bits >> np.uint32(16)).astype(np.uint16)
    count = min(type_.size, PERIOD)
    if type_.dtype.kind != "f":
        elements = rng.integers(0, 2 if type_.dtype.kind == "b" else limit, count).astype(type_.dtype)
    elif gradients:
        magnitude = GRADIENT_SCALE * np.exp(GRADIENT_SPREAD * rng.standard_normal(count))
        live = rng.random(count) >= GRADIENT_ZEROS
        elements = (magnitude * live * rng.choice((-1.0, 1.0), count)).astype(type_.dtype)
    else:
        elements = rng.standard_normal(count, type_.dtype)
    return np.resize(elements, type_.shape)


def _index_limit(equation: Equation) -> int:
    """The exclusive upper bound of integer arguments: the length that they index, or 256."""
    params = equation.params
    for name in ("length", "num_classes"):
        if name in params:
            return int(params[name])
    if "windows" in params:
        return prod(params["windows"].kernel)
    if "axis" in params and equation.inputs[0].type.shape:
        return int(equation.inputs[0].type.shape[params["axis"]])
    return 256
