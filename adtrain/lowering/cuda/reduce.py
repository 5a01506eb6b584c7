"""The CUDA kernels of reductions: which of `kernels/cuda/reduce/reduce.cu`, and when.

How work is divided follows from the shapes alone, so that every device computes the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from adtrain.core.kernel import LegacyKernel, first_dtype, legacy
from adtrain.core.registry import register
from adtrain.lowering.shapes import alternating, output_type

WARP = 32
FEW, MORE = 1024, 8192
"""Elements that a warp goes through by itself, and of many outputs; more are for a block."""
MANY = 8192
"""As many warps keep the largest GPU busy."""
MANY_BLOCKS = 1024
"""As many blocks keep the largest GPU busy; a reduction of fewer is divided into parts."""
LEAST_ROW, LEAST_COLUMN = 8192, 512
"""Elements of an output in a part that is worth a block of its own."""
MOST_PARTS = 1024
VECTOR = 16
"""Bytes that a thread reads at once."""
THREADS = 256
"""Threads of a block; reduce/reduce.cu is written for as many."""
ROW = 128
"""Bytes of the rows that are left to a thread each."""
COLUMNS = 4
"""The most columns that a thread reads at once."""
UNDER_WAY = 4
"""Elements of a column that a thread reads before it adds up any."""

SUM, MAX, MIN, ARGMAX, LOGSUMEXP = range(5)
"""OPERATION in kernels/cuda/reduce/accumulators.cuh."""


def power_of_two(least: int) -> int:
    """The smallest one that is not below ``least``."""
    return 1 << max(least - 1, 0).bit_length()


def vector(length: int, itemsize: int) -> int:
    """Elements of the widest vector that rows of a length are made of."""
    return math.gcd(length, VECTOR // itemsize)


def short_row(x: Any, length: int) -> bool:
    """Whether contiguous rows are best read by a block for its threads: they are few bytes, and no whole vectors."""
    return length * x.dtype.itemsize < ROW and vector(length, x.dtype.itemsize) * x.dtype.itemsize < VECTOR


def reduction(operation: int, dtypes: Callable[..., Any]) -> tuple[LegacyKernel, ...]:
    """The candidates of an operation of an array and ``axes``, or an ``axis``; ``dtypes`` ends in the result's."""

    def lengths(x: Any, **axes: Any) -> tuple[int, ...]:
        return alternating(x.shape, axes.get("axes", (axes.get("axis"),)), 8)

    def size(x: Any, **axes: Any) -> tuple[int, int]:
        found = lengths(x, **axes)
        return math.prod(found[::2]), math.prod(found[1::2])

    def outputs(x: Any, **axes: Any) -> int:
        return size(x, **axes)[0]

    def rows(x: Any, **axes: Any) -> bool:
        return lengths(x, **axes)[-1] > 1 or size(x, **axes)[0] == 1

    def contiguous(x: Any, **axes: Any) -> bool:
        """Whether an output's elements are one row."""
        return math.prod(lengths(x, **axes)[1:-2:2]) == 1 and rows(x, **axes)

    def types(x: Any, **axes: Any) -> tuple[Any, Any]:
        return x.dtype, dtypes(x, **axes)[-1]

    def state(x: Any, **axes: Any) -> int:
        """Bytes that are kept of a part."""
        each = max(types(x, **axes)[operation == SUM].itemsize, 8 * (operation == ARGMAX))
        return each * (1 if operation in (SUM, MAX, MIN) else 2)

    def across(x: Any, **axes: Any) -> int:
        """Columns that a thread reads at once."""
        return math.gcd(lengths(x, **axes)[-2], min(COLUMNS, VECTOR // x.dtype.itemsize))

    def column_lanes(x: Any, **axes: Any) -> int:
        """Threads side by side: a warp's, fewer for few columns, and more where columns are too short to be shared."""
        found, count = size(x, **axes)
        wide = min(power_of_two(-(-found // across(x, **axes))), WARP)
        return min(max(wide, power_of_two(-(-THREADS * UNDER_WAY // max(count, 1)))), THREADS)

    def column_blocks(x: Any, **axes: Any) -> int:
        return -(-outputs(x, **axes) // (column_lanes(x, **axes) * across(x, **axes)))

    def parts(x: Any, **axes: Any) -> tuple[int, int]:
        """How many, and the elements in each."""
        found, count = size(x, **axes)
        blocks, least = (found, LEAST_ROW) if rows(x, **axes) else (column_blocks(x, **axes), LEAST_COLUMN)
        wanted = max(1, min(-(-MANY_BLOCKS // max(blocks, 1)), count // least, MOST_PARTS))
        chunk = -(-count // wanted)
        chunk += -chunk % 16  # starts of parts stay aligned
        return -(-count // max(chunk, 1)), chunk

    def divided(x: Any, **axes: Any) -> bool:
        return parts(x, **axes)[0] > 1

    def few(x: Any, **axes: Any) -> bool:
        return contiguous(x, **axes) and size(x, **axes)[1] <= FEW

    def warps(x: Any, **axes: Any) -> bool:
        """Whether rows are best read by a warp each, whatever their alignment."""
        found, count = size(x, **axes)
        unaligned = vector(max(count, 1), x.dtype.itemsize) * x.dtype.itemsize < VECTOR
        return contiguous(x, **axes) and (
            (FEW < count <= MORE and found >= MANY) or (count <= FEW and count * x.dtype.itemsize >= ROW and unaligned)
        )

    def lane_macros(x: Any, **axes: Any) -> dict[str, int]:
        length = size(x, **axes)[1]
        width = vector(max(length, 1), x.dtype.itemsize)
        return {**macros(), "LANES": min(power_of_two(-(-length // width)), WARP), "WIDTH": width}

    def column_macros(x: Any, **axes: Any) -> dict[str, int]:
        return {**macros(), "LANES": column_lanes(x, **axes), "WIDTH": across(x, **axes)}

    def macros(*args: Any, **params: Any) -> dict[str, int]:
        return {"OPERATION": operation}

    whole = LegacyKernel("reduce/reduce.cu", "", lengths, types, definitions=macros, threads=lambda x, **axes: THREADS)
    combine = LegacyKernel(
        "reduce/reduce.cu",
        "combine",
        lambda x, **axes: (outputs(x, **axes), parts(x, **axes)[0]),
        types,
        elements=lambda x, **axes: outputs(x, **axes) * WARP,
        definitions=macros,
    )
    in_parts = replace(
        whole,
        numbers=lambda x, **axes: (*lengths(x, **axes), *parts(x, **axes)),
        scratch=lambda x, **axes: outputs(x, **axes) * parts(x, **axes)[0] * state(x, **axes),
        then=combine,
    )
    return (
        replace(
            whole,
            name="reduce_rows",
            numbers=lambda x, **axes: (outputs(x, **axes),),
            blocks=lambda x, **axes: -(-outputs(x, **axes) // THREADS),
            definitions=lambda x, **axes: {**macros(), "LENGTH": size(x, **axes)[1]},
            applies=lambda x, **axes: few(x, **axes) and outputs(x, **axes) >= FEW and short_row(x, size(x, **axes)[1]),
        ),
        replace(
            whole,
            name="reduce_warps",
            numbers=size,
            elements=lambda x, **axes: outputs(x, **axes) * WARP,
            applies=warps,
        ),
        replace(
            whole,
            name="reduce_lanes",
            numbers=size,
            elements=lambda x, **axes: outputs(x, **axes) * lane_macros(x, **axes)["LANES"],
            definitions=lane_macros,
            applies=few,
        ),
        replace(
            in_parts,
            name="reduce_block_parts",
            blocks=lambda x, **axes: outputs(x, **axes) * parts(x, **axes)[0],
            applies=lambda x, **axes: rows(x, **axes) and divided(x, **axes),
        ),
        replace(whole, name="reduce_block", blocks=outputs, applies=rows),
        replace(
            in_parts,
            name="reduce_columns_parts",
            blocks=lambda x, **axes: column_blocks(x, **axes) * parts(x, **axes)[0],
            definitions=column_macros,
            applies=lambda x, **axes: not rows(x, **axes) and divided(x, **axes),
        ),
        replace(
            whole,
            name="reduce_columns",
            blocks=column_blocks,
            definitions=column_macros,
            applies=lambda x, **axes: not rows(x, **axes),
        ),
    )


register("sum", "cuda", legacy(reduction(SUM, lambda x, axes: (output_type("sum", x, axes=axes).dtype,))))
register("max", "cuda", legacy(reduction(MAX, first_dtype)))
register("min", "cuda", legacy(reduction(MIN, first_dtype)))
register("argmax", "cuda", legacy(reduction(ARGMAX, lambda x, axis: (np.dtype(np.int64),))))
register("logsumexp", "cuda", legacy(reduction(LOGSUMEXP, first_dtype)))
