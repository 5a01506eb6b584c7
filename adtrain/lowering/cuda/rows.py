"""The CUDA kernels of softmax, normalisation, running sums, indexing and random numbers, and when each is taken.

How work is divided follows from the shapes alone, so that every device computes the same bits; how it is spread over a
device is the backend's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from adtrain.core.kernel import LegacyKernel
from adtrain.lowering.cpu.shapes import alternating, around
from adtrain.lowering.cuda.reduce import FEW, LEAST_ROW, MANY_BLOCKS, ROW, WARP, power_of_two, short_row, vector

BLOCK = 256
"""Threads of a block where they go through shared memory: enough loads under way, and a barrier costs little."""
HELD_ROW = 64 << 10
"""Bytes of a row that a block's registers hold, and its shared memory on every device."""
WARP_ROW, EACH = 4096, 64
"""Bytes of a row up to which it is for a warp's lanes, and that are enough for a thread."""
NARROW, MOST_TEAM = 8, 512
"""The fewest lanes that share a row of many vectors, which they read side by side; the most threads that do."""
MANY_LINES, LEAST_LINE = 1 << 18, 64
"""Threads that keep the largest GPU busy with columns of running sums; the least elements of a thread's part."""


def _held(length: int, itemsize: int) -> dict[str, int]:
    """TEAM threads that keep a row in their registers, ITEMS vectors of WIDTH each; ITEMS is 0 where it is too long."""
    width, size = vector(length, itemsize), length * itemsize
    vectors, enough = length // width, power_of_two(-(-size // EACH))
    team = min(power_of_two(vectors), max(NARROW, min(enough, WARP))) if size <= WARP_ROW else min(enough, MOST_TEAM)
    return {"TEAM": team, "ITEMS": -(-vectors // team) if size <= HELD_ROW else 0, "WIDTH": width}


def _teams(kernel: LegacyKernel, rows: Callable[..., tuple[int, int]]) -> tuple[LegacyKernel, LegacyKernel]:
    """A kernel of rows held in registers, by lanes of warps and by blocks; ``rows``: how many, and their length, or
    length 0 where there are no rows."""

    def held(x: Any, *args: Any, **params: Any) -> dict[str, int]:
        return _held(rows(x, **params)[1], x.dtype.itemsize)

    def fits(x: Any, **params: Any) -> bool:
        return rows(x, **params)[1] > 0 and held(x, **params)["ITEMS"] > 0

    tuned = replace(kernel, definitions=lambda x, **params: {**kernel.definitions(x, **params), **held(x, **params)})
    return (
        replace(
            tuned,
            elements=lambda x, **params: rows(x, **params)[0] * held(x, **params)["TEAM"],
            applies=lambda x, **params: fits(x, **params) and held(x, **params)["TEAM"] <= WARP,
        ),
        replace(
            tuned,
            blocks=lambda x, **params: rows(x, **params)[0],
            threads=lambda x, **params: held(x, **params)["TEAM"],
            applies=fits,
        ),
    )


def softmax(logarithm: bool) -> tuple[LegacyKernel, ...]:
    """The candidates of softmax or its logarithm."""

    def macros(x: Any, axis: int) -> dict[str, int]:
        return {"LOGARITHM": int(logarithm)}

    def with_length(x: Any, axis: int) -> dict[str, int]:
        return {**macros(x, axis), "LENGTH": x.shape[axis]}

    def neighbours(x: Any, axis: int) -> bool:
        return around(x.shape, axis)[2] == 1

    def rows(x: Any, axis: int) -> tuple[int, int]:
        outer, length, inner = around(x.shape, axis)
        return outer, length if inner == 1 else 0

    def short(x: Any, axis: int) -> bool:
        return neighbours(x, axis) and around(x.shape, axis)[0] >= FEW and short_row(x, x.shape[axis])

    general = LegacyKernel("reduce/softmax.cu", "", lambda x, axis: around(x.shape, axis), definitions=macros)
    return (
        replace(
            general,
            name="softmax_rows",
            numbers=lambda x, axis: around(x.shape, axis)[:1],
            blocks=lambda x, axis: -(-around(x.shape, axis)[0] // BLOCK),
            threads=lambda x, axis: BLOCK,
            definitions=with_length,
            applies=short,
        ),
        *_teams(replace(general, name="softmax_team", numbers=rows), rows),
        replace(
            general,
            name="softmax_long",
            numbers=lambda x, axis: (*rows(x, axis), HELD_ROW),
            blocks=lambda x, axis: around(x.shape, axis)[0],
            threads=lambda x, axis: MOST_TEAM,
            shared=lambda x, axis: HELD_ROW,
            applies=neighbours,
        ),
        replace(
            general,
            file="reduce/softmax_columns.cu",
            name="softmax_columns",
            numbers=lambda x, axis: around(x.shape, axis)[::2],
            elements=lambda x, axis: math.prod(around(x.shape, axis)[::2]),
            definitions=with_length,
            applies=lambda x, axis: x.shape[axis] * x.dtype.itemsize <= ROW,
        ),
        replace(
            general,
            file="reduce/softmax_columns.cu",
            name="softmax_long_columns",
            blocks=lambda x, axis: -(-math.prod(around(x.shape, axis)[::2]) // WARP),
            threads=lambda x, axis: 2 * BLOCK,
            definitions=lambda x, axis: {
                **macros(x, axis),
                "WIDTH": vector(around(x.shape, axis)[2], x.dtype.itemsize),
            },
        ),
    )


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
    return *_teams(team, rows), replace(moments, then=replace(combine, then=apply))


def cumsum(dtypes: Callable[..., Any]) -> tuple[LegacyKernel, ...]:
    """The candidates of a running sum: lines or columns, whole or, where there are few, in parts."""

    def lines(x: Any, axis: int, reverse: bool) -> int:
        outer, _, inner = around(x.shape, axis)
        return outer * inner

    def neighbours(x: Any, axis: int, reverse: bool) -> bool:
        """Whether lines are of neighbouring elements, and long enough to be shared."""
        _, length, inner = around(x.shape, axis)
        return inner == 1 and length > WARP

    def parts(x: Any, axis: int, reverse: bool) -> tuple[int, int]:
        """How many, and the elements in each."""
        length, found = x.shape[axis], lines(x, axis, reverse)
        wanted, least = (MANY_BLOCKS, LEAST_ROW) if neighbours(x, axis, reverse) else (MANY_LINES, LEAST_LINE)
        count = max(1, min(-(-wanted // max(found, 1)), length // least))
        chunk = max(-(-length // count), 1)
        return -(-length // chunk), chunk

    def numbers(x: Any, **params: Any) -> tuple[int, ...]:
        return *around(x.shape, params["axis"]), params["reverse"], *parts(x, **params)

    def work(x: Any, **params: Any) -> int:
        return lines(x, **params) * parts(x, **params)[0]

    def scratch(x: Any, **params: Any) -> int:
        return work(x, **params) * dtypes(x, **params)[-1].itemsize if parts(x, **params)[0] > 1 else 0

    def pair(sums: str, name: str, **launch: Any) -> tuple[LegacyKernel, LegacyKernel]:
        whole = LegacyKernel("reduce/cumsum.cu", name, numbers, dtypes, scratch=scratch, **launch)
        return replace(whole, name=sums, then=whole, applies=lambda x, **params: parts(x, **params)[0] > 1), whole

    in_blocks = pair("cumsum_sums", "cumsum_block", blocks=work, threads=lambda x, **params: BLOCK)
    both = [
        replace(k, applies=lambda x, k=k, **params: neighbours(x, **params) and k.applies(x, **params))
        for k in in_blocks
    ]
    return *both, *pair("cumsum_column_sums", "cumsum_columns", elements=work)


def indexing(name: str, numbers: Callable[..., tuple[int, ...]], along: int, rows: bool = False) -> LegacyKernel:
    """A kernel of an array and indices; ``along`` is the number, among its own, of the lengths beside outer and inner
    that make up its result; with ``rows`` it moves vectors of inner elements."""

    def width(*args: Any, **params: Any) -> int:
        return vector(numbers(*args, **params)[2], args[0].dtype.itemsize) if rows else 1

    def elements(*args: Any, **params: Any) -> int:
        found = numbers(*args, **params)
        return found[0] * found[2] * found[along] // width(*args, **params)

    return LegacyKernel(
        "index/index.cu",
        name,
        numbers,
        lambda x, indices, **params: (x.dtype, indices.dtype),
        elements=elements,
        definitions=lambda *args, **params: {"WIDTH": width(*args, **params)},
        checked=True,
    )


def scatter_along(numbers: Callable[..., tuple[int, ...]]) -> tuple[LegacyKernel, LegacyKernel]:
    """The candidates of a scatter along an axis; ``numbers``: outer, length, inner and positions along the axis."""

    def width(ct: Any, indices: Any, **params: Any) -> int:
        _, length, inner, _ = numbers(ct, indices, **params)
        return vector(inner if inner > 1 else length, ct.dtype.itemsize)

    def vectors(*args: Any, **params: Any) -> int:
        return math.prod(numbers(*args, **params)[:3]) // width(*args, **params)

    def lines(*args: Any, **params: Any) -> int:
        return math.prod(numbers(*args, **params)[:3:2])

    added = replace(indexing("scatter_along_axis", numbers, along=1), elements=lines)
    whole = replace(added, elements=vectors, definitions=lambda *args, **params: {"WIDTH": width(*args, **params)})
    one = replace(whole, name="scatter_one", applies=lambda *args, **params: numbers(*args, **params)[3] == 1)
    return one, replace(whole, name="clear_along_axis", then=added)


ONE_HOT = LegacyKernel(
    "index/index.cu",
    "one_hot",
    lambda indices, num_classes, dtype: (math.prod(indices.shape), num_classes),
    lambda indices, num_classes, dtype: (dtype, indices.dtype),
    elements=lambda indices, num_classes, dtype: math.prod(indices.shape) * num_classes,
    checked=True,
)
RANDOM_UNIFORM = LegacyKernel(
    "index/random.cu",
    "random_uniform",
    lambda rng, shape, stream, dtype: (math.prod(shape), stream),
    lambda rng, shape, stream, dtype: (dtype,),
    elements=lambda rng, shape, stream, dtype: -(-math.prod(shape) // 4),
)
