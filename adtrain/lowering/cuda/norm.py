"""Normalisation: `reduce/norm.cu`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from adtrain.core.kernel import LegacyKernel, legacy
from adtrain.core.registry import register
from adtrain.lowering.cuda.reduce import LEAST_ROW, MANY_BLOCKS, WARP, vector
from adtrain.lowering.cuda.rows import teams
from adtrain.lowering.shapes import alternating

BLOCK = 256
"""Threads of a block."""


def standardize() -> tuple[LegacyKernel, ...]:
    """The candidates of standardize: rows, or anything in three passes."""

    def lengths(x: Any, axes: Any) -> tuple[int, ...]:
        return alternating(x.shape, axes, 4)

    def rows(x: Any, axes: Any, eps: float) -> tuple[int, int]:
        k0, r0, k1, r1 = lengths(x, axes)
        return k0 * k1, r1 if r0 == 1 else 0

    def across(x: Any, axes: Any) -> int:
        """Neighbouring outputs of a block."""
        return WARP if lengths(x, axes)[3] == 1 else 1

    def tiles(x: Any, axes: Any) -> int:
        k0, _, k1, _ = lengths(x, axes)
        return k0 * -(-k1 // across(x, axes))

    def parts(x: Any, axes: Any) -> tuple[int, int]:
        """How many, and the runs of r1 in each."""
        _, r0, _, r1 = lengths(x, axes)
        wanted = min(-(-MANY_BLOCKS // max(tiles(x, axes), 1)), r0 * r1 * across(x, axes) // LEAST_ROW, r0)
        chunk = -(-r0 // max(wanted, 1))
        return -(-r0 // chunk), chunk

    def width(x: Any, axes: Any) -> int:
        _, _, k1, r1 = lengths(x, axes)
        return vector(r1 if r1 > 1 else k1, x.dtype.itemsize)

    def outputs(x: Any, axes: Any) -> int:
        return math.prod(lengths(x, axes)[::2])

    apply = LegacyKernel(
        "reduce/norm.cu",
        "standardize_apply",
        lambda x, axes, eps: (*lengths(x, axes), float(eps)),
        elements=lambda x, axes, eps: x.size // width(x, axes),
        definitions=lambda x, axes, eps: {"WIDTH": width(x, axes)},
    )
    combine = LegacyKernel(
        "reduce/norm.cu",
        "standardize_combine",
        lambda x, axes, eps: (outputs(x, axes), parts(x, axes)[0]),
        elements=lambda x, axes, eps: outputs(x, axes) * WARP,
    )
    moments = LegacyKernel(
        "reduce/norm.cu",
        "standardize_parts",
        lambda x, axes, eps: (*lengths(x, axes), across(x, axes), *parts(x, axes)),
        blocks=lambda x, axes, eps: tiles(x, axes) * parts(x, axes)[0],
        threads=lambda x, axes, eps: BLOCK,
        definitions=lambda x, axes, eps: {"WIDTH": width(x, axes)},
        scratch=lambda x, axes, eps: outputs(x, axes) * parts(x, axes)[0] * 3 * x.dtype.itemsize,
        then=combine,
    )
    team = LegacyKernel("reduce/norm.cu", "standardize_team", lambda x, axes, eps: (*rows(x, axes, eps), float(eps)))
    return *teams(team, rows), replace(moments, then=replace(combine, then=apply))


register("standardize", "cuda", legacy(standardize()))
