"""The precision of float32 matrix products and convolutions, set by a block around the code that calls them.

An operation reads the precision when it is called, and stores it as its parameter. Its derivatives have the same
parameter, wherever they are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from adtrain.core.errors import OptionError
from adtrain.core.setting import Setting

FULL, TF32 = "full", "tf32"
PRECISIONS = (FULL, TF32, "bfloat16")
DROPPED_BITS = {TF32: 13, "bfloat16": 16, "bf16x2": 8}
"""Mantissa bits of float32 that operands lose, by precision, or by operand format (see TERMS)."""
FLOAT32 = "float32"
TERMS = {"bfloat16": 1, TF32: 1, "bf16x2": 2, "bf16x3": 3, FLOAT32: 1}
"""By operand format, the number of arrays whose sum is an operand of a channels-last convolution. The arrays are
bfloat16; for tf32 the array is float32, and the kernel rounds it; for float32 it does not. See `ops.channels_last`."""
OF_PRECISION = {"bfloat16": "bfloat16", TF32: "bf16x2", FULL: "bf16x3"}
"""By precision, the operand format whose bfloat16 terms hold at least the bits of an operand."""


def mantissa(precision: str) -> int:
    """Mantissa bits of an operand after rounding."""
    return 23 - DROPPED_BITS.get(precision, 0)


_chosen = Setting(FULL)


def current_precision() -> str:
    """The precision of the innermost block, "full" outside: one of PRECISIONS."""
    return _chosen.value


def precision_of(dtype: np.dtype) -> str:
    """The precision of a product of arrays of ``dtype``; always "full" for float64."""
    return _chosen.value if dtype == np.float32 else FULL


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set the precision of the float32 matrix products and convolutions in a block, and of their derivatives.

    - ``"full"``, the default: operands have the 23 bits of mantissa of float32.
    - ``"tf32"``: operands are rounded to 10 bits of mantissa.
    - ``"bfloat16"``: operands are rounded to 7 bits of mantissa.

    Operands are rounded to nearest, ties to even. Sums and results are float32. float64 is not rounded. On the CPU
    rounded products run by NumPy, for comparison with a GPU.

    "tf32" and "bfloat16" permit rounding. On a GPU a jitted function rounds only the products that become faster. A
    GPU of a compute capability below 8.0 computes most products in full precision.

    In a jitted function, "bfloat16" also permits that the results of its products, and large values computed from them
    alone, are rounded to bfloat16 where kernels store them. Arithmetic on them is float32. What the function returns is
    not rounded, nor are sums and softmax.

        with ops.matmul_precision("tf32"):
            y = ops.matmul(x, w)

    Raises:
        OptionError: there is no such precision.
    """
    if precision not in PRECISIONS:
        raise OptionError(f"matmul_precision: found {precision!r}, expected one of {', '.join(PRECISIONS)}")
    with _chosen.replaced(precision):
        yield


def rounded(x: np.ndarray, precision: str) -> np.ndarray:
    """float32 ``x`` rounded to nearest, ties to even, as float32; itself for "full".

    NaN and infinities are unchanged. Numbers above the largest of the format that round up become infinite.
    """
    if precision == FULL:
        return x
    dropped = DROPPED_BITS[precision]
    bits = np.ascontiguousarray(x).view(np.uint32)
    half = np.uint32((1 << (dropped - 1)) - 1)
    odd = (bits >> np.uint32(dropped)) & np.uint32(1)
    # The sum carries into the exponent where the mantissa overflows, which is the next number there too.
    nearest = (bits + half + odd) & ~np.uint32((1 << dropped) - 1)
    return np.where(np.isnan(x), x, nearest.view(np.float32).reshape(x.shape))
