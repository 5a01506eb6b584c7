"""Normalisation: `reduce/norm.cu`."""

from __future__ import annotations

import math
from typing import Any

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.memory_layout import memory_layout
from adtrain.core.registry import register
from adtrain.core.target import WARP, Target
from adtrain.lowering.cuda.reduce import MIN_BLOCKS, MIN_ROW_PART, of_one_member, vector_width
from adtrain.lowering.shapes import alternating, element_types

BLOCK = 256
"""Threads per block."""


def standardize(target: Target, x: Any, axes: tuple[int, ...], eps: float) -> list[CudaKernel]:
    """The kernel: moments of parts, moments, and the elements.

    ``x`` and the result may be bfloat16 in memory.
    """
    dtypes = computed, _ = element_types(x.dtype)
    lengths = k0, r0, k1, r1 = alternating(x.shape, axes, 4)
    outputs = k0 * k1
    across = WARP if r1 == 1 else 1  # neighbouring outputs of a block
    tiles = k0 * -(-k1 // across)
    wanted = min(-(-MIN_BLOCKS // max(of_one_member(target, x, tiles), 1)), r0 * r1 * across // MIN_ROW_PART, r0)
    runs = -(-r0 // max(wanted, 1))  # of r1 elements, per part
    parts = -(-r0 // runs)
    width = {"WIDTH": vector_width(r1 if r1 > 1 else k1, x.dtype.itemsize)}
    scratch = memory_layout("SCRATCH", {"MOMENTS": (3 * computed.itemsize, outputs * parts)})

    def launch(name: str, numbers: tuple[int | float, ...], **work: Any) -> CudaLaunch:
        return CudaLaunch("reduce/norm.cu", name, numbers, dtypes, layouts=(scratch,), **work)

    moments_of_parts = launch(
        "standardize_parts",
        (*lengths, across, parts, runs),
        definitions=width,
        blocks=tiles * parts,
        threads=BLOCK,
    )
    moments = launch("standardize_combine", (outputs, parts), elements=outputs * WARP)
    apply = launch(
        "standardize_apply", (*lengths, float(eps)), definitions=width, elements=math.prod(lengths) // width["WIDTH"]
    )
    return [CudaKernel((moments_of_parts, moments, apply), scratch)]


register("standardize", "cuda", standardize)
register("standardize_bfloat16", "cuda", standardize)
