"""How exactly float32 matrix products and convolutions are computed, said by a block around the code that makes them.

The operations read it once, when they are called, and keep it as a parameter of theirs; derivatives inherit it from the
operation that they are derivatives of, wherever they are taken.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from adtrain.core.errors import OptionError

FULL = "full"
PRECISIONS = (FULL, "tf32", "bfloat16")
DROPPED_BITS = {"tf32": 13, "bfloat16": 16}
"""Mantissa bits of float32 that operands lose, by precision."""


def mantissa(precision: str) -> int:
    """Mantissa bits that operands keep."""
    return 23 - DROPPED_BITS.get(precision, 0)


class _Chosen(threading.local):
    precision = FULL


_chosen = _Chosen()


def current_precision() -> str:
    """One of PRECISIONS: the innermost block's, or "full" outside of all."""
    return _chosen.precision


def precision_of(dtype: np.dtype) -> str:
    """The precision of a product of arrays of ``dtype``: float64 is always computed in full."""
    return _chosen.precision if dtype == np.float32 else FULL


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Let float32 matrix products and convolutions made in a block, and all their derivatives, be of a precision.

    - ``"full"``, the default: as exact as float32 products are.
    - ``"tf32"``: the operands are rounded to 10 bits of mantissa.
    - ``"bfloat16"``: the operands are rounded to 7 bits of mantissa.

    Operands are rounded to nearest, ties to even; products are summed up in float32, and results are float32. float64
    stays full. On the CPU rounded products run on NumPy, for comparison with a GPU.

        with ops.matmul_precision("tf32"):
            y = ops.matmul(x, w)

    Raises:
        OptionError: there is no such precision.
    """
    if precision not in PRECISIONS:
        raise OptionError(f"matmul_precision: found {precision!r}, expected one of {', '.join(PRECISIONS)}")
    outer = _chosen.precision
    _chosen.precision = precision
    try:
        yield
    finally:
        _chosen.precision = outer
