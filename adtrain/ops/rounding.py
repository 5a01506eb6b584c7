"""float32 rounded to tf32 or bfloat16, as operands of matrix products and convolutions are."""

from __future__ import annotations

import numpy as np

from adtrain.core.precision import DROPPED_BITS, FULL


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
