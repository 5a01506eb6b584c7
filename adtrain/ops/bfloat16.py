"""Arrays of bfloat16: conversions, and their matrix product.

An element is its 16 bits as a uint16 (`core.types.BITS`). The pass `store_bfloat16` replaces matrix products of
precision bfloat16 by these equations. It runs after differentiation, so they have no derivatives.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from adtrain.core.errors import DTypeError
from adtrain.core.precision import rounded
from adtrain.core.primitive import Primitive, Trait
from adtrain.core.types import BITS, ArrayType
from adtrain.ops.matmul import matmul_p

FLOAT32 = np.dtype(np.float32)


def _converted_type(name: str, x: Any, source: np.dtype, target: np.dtype) -> ArrayType:
    if x.dtype != source:
        raise DTypeError(f"{name}: found {x.dtype}, expected {source}")
    return ArrayType(x.shape, target)


def _to_bits(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, FLOAT32)
    bits = rounded(x, "bfloat16").view(np.uint32) >> np.uint32(16)
    return np.where(np.isnan(x), bits | np.uint32(0x40), bits).astype(BITS)


def from_bits(x: np.ndarray) -> np.ndarray:
    """bfloat16 bits as float32 numbers."""
    return (x.astype(np.uint32) << np.uint32(16)).view(FLOAT32)


to_bfloat16_p = Primitive(
    "to_bfloat16",
    lambda x: _converted_type("to_bfloat16", x, FLOAT32, BITS),
    _to_bits,
    expression="bfloat16_bits(a)",
)
"""(x): float32 rounded to the nearest bfloat16, ties to even, as its bits."""

from_bfloat16_p = Primitive(
    "from_bfloat16",
    lambda x: _converted_type("from_bfloat16", x, BITS, FLOAT32),
    from_bits,
    expression="bfloat16_value(a)",
    traits=(Trait.WIDENING,),
)
"""(x): bfloat16 bits as float32 numbers, exactly."""


bfloat16_rest_p = Primitive(
    "bfloat16_rest",
    lambda x, bits: _converted_type("bfloat16_rest", x, FLOAT32, FLOAT32),
    lambda x, bits: np.subtract(x, from_bits(bits), dtype=FLOAT32),
    expression="a - bfloat16_value(b)",
)
"""(x, bits): float32 numbers minus what they are as bfloat16, exactly."""


def as_float32(name: str, x: Any) -> ArrayType:
    """The type of an array of bfloat16 bits after its conversion to float32.

    Raises:
        DTypeError: it has another type; `name` names the operation.
    """
    return _converted_type(name, x, BITS, FLOAT32)


def _as_float32(x: Any) -> ArrayType:
    return as_float32("matmul_bfloat16", x)


matmul_bfloat16_p = Primitive(
    "matmul_bfloat16",
    lambda a, b, **params: matmul_p.shape(_as_float32(a), _as_float32(b), **params),
    lambda a, b, **params: matmul_p.reference(from_bits(a), from_bits(b), **params),
    flops=lambda a, b, **params: matmul_p.cost([_as_float32(a), _as_float32(b)], params).flops,
    traits=(Trait.MATMUL,),
    axes=matmul_p.axes,
)
"""(a, b; transpose_a, transpose_b, precision): the float32 product of bfloat16 matrices. precision is "bfloat16"."""
