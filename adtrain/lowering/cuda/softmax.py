"""softmax and its logarithm: `reduce/softmax.cu` and `reduce/softmax_columns.cu`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from adtrain.core.kernel import LegacyKernel, legacy
from adtrain.core.registry import register
from adtrain.lowering.cuda.reduce import FEW, ROW, WARP, short_row, vector
from adtrain.lowering.cuda.rows import HELD_ROW, MOST_TEAM, teams
from adtrain.lowering.shapes import split_at

BLOCK = 256
"""Threads of a block."""


def softmax(logarithm: bool) -> tuple[LegacyKernel, ...]:
    """The candidates of softmax or its logarithm."""

    def macros(x: Any, axis: int) -> dict[str, int]:
        return {"LOGARITHM": int(logarithm)}

    def with_length(x: Any, axis: int) -> dict[str, int]:
        return {**macros(x, axis), "LENGTH": x.shape[axis]}

    def neighbours(x: Any, axis: int) -> bool:
        return split_at(x.shape, axis)[2] == 1

    def rows(x: Any, axis: int) -> tuple[int, int]:
        outer, length, inner = split_at(x.shape, axis)
        return outer, length if inner == 1 else 0

    def short(x: Any, axis: int) -> bool:
        return neighbours(x, axis) and split_at(x.shape, axis)[0] >= FEW and short_row(x, x.shape[axis])

    general = LegacyKernel("reduce/softmax.cu", "", lambda x, axis: split_at(x.shape, axis), definitions=macros)
    return (
        replace(
            general,
            name="softmax_rows",
            numbers=lambda x, axis: split_at(x.shape, axis)[:1],
            blocks=lambda x, axis: -(-split_at(x.shape, axis)[0] // BLOCK),
            threads=lambda x, axis: BLOCK,
            definitions=with_length,
            applies=short,
        ),
        *teams(replace(general, name="softmax_team", numbers=rows), rows),
        replace(
            general,
            name="softmax_long",
            numbers=lambda x, axis: (*rows(x, axis), HELD_ROW),
            blocks=lambda x, axis: split_at(x.shape, axis)[0],
            threads=lambda x, axis: MOST_TEAM,
            shared=lambda x, axis: HELD_ROW,
            applies=neighbours,
        ),
        replace(
            general,
            file="reduce/softmax_columns.cu",
            name="softmax_columns",
            numbers=lambda x, axis: split_at(x.shape, axis)[::2],
            elements=lambda x, axis: math.prod(split_at(x.shape, axis)[::2]),
            definitions=with_length,
            applies=lambda x, axis: x.shape[axis] * x.dtype.itemsize <= ROW,
        ),
        replace(
            general,
            file="reduce/softmax_columns.cu",
            name="softmax_long_columns",
            blocks=lambda x, axis: -(-math.prod(split_at(x.shape, axis)[::2]) // WARP),
            threads=lambda x, axis: 2 * BLOCK,
            definitions=lambda x, axis: {
                **macros(x, axis),
                "WIDTH": vector(split_at(x.shape, axis)[2], x.dtype.itemsize),
            },
        ),
    )


register("softmax", "cuda", legacy(softmax(logarithm=False)))
register("log_softmax", "cuda", legacy(softmax(logarithm=True)))
