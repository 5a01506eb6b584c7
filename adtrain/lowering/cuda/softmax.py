"""softmax and its logarithm: `reduce/softmax.cu`."""

from __future__ import annotations

from functools import partial
from typing import Any

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.registry import register
from adtrain.core.target import WARP, Target
from adtrain.lowering.cuda.reduce import power_of_two
from adtrain.lowering.shapes import element_types, split_at

ROW_THREADS, COLUMN_THREADS, IN_FLIGHT = 256, 1024, 8
"""Threads of a block, for contiguous lines and for others; elements that a thread loads at once."""


def softmax(logarithm: bool, target: Target, x: Any, axis: int) -> list[CudaKernel]:
    """The kernel for softmax, or for its logarithm. ``x`` may be bfloat16 in memory."""
    outer, length, inner = split_at(x.shape, axis)
    threads, least = (ROW_THREADS, 1) if inner == 1 else (COLUMN_THREADS, WARP)
    lines, across = outer * inner, max(threads // power_of_two(-(-length // IN_FLIGHT)), least)
    macros = {"LOGARITHM": int(logarithm), "THREADS": threads, "ACROSS": across, "IN_FLIGHT": IN_FLIGHT}
    launch = CudaLaunch(
        "reduce/softmax.cu",
        "softmax",
        (lines, length, inner),
        element_types(x.dtype),
        blocks=-(-lines // across),
        threads=threads,
        definitions=macros,
    )
    return [CudaKernel((launch,))]


for _name, _logarithm in (("softmax", False), ("log_softmax", True)):
    register(_name, "cuda", partial(softmax, _logarithm))
    register(f"{_name}_bfloat16", "cuda", partial(softmax, _logarithm))
