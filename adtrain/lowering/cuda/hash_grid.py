"""The hash encoding of points: `index/hash_grid.cu`."""

from __future__ import annotations

from typing import Any

from adtrain.core.kernel import CudaKernel, CudaLaunch, Target, lengths, memory_layout, register
from adtrain.lowering.cuda.reduce import vector_width
from adtrain.lowering.layouts import Ints, axis_bits


def _definitions(points: Any, levels: Any, features: int, itemsize: int) -> dict[str, int]:
    return {
        "COORDINATES": points.shape[1],
        "LEVELS": levels.shape[0],
        "FEATURES": features,
        "WIDTH": vector_width(features, itemsize),
    }


def hash_grid(target: Target, points: Any, table: Any, levels: Any, along: Ints) -> list[CudaKernel]:
    macros = _definitions(points, levels, table.shape[1], table.dtype.itemsize)
    elements = 2 * points.shape[0] * levels.shape[0] * table.shape[1] // macros["WIDTH"]
    numbers = points.shape[0], axis_bits(along)
    launch = CudaLaunch("index/hash_grid.cu", "hash_grid", numbers, (table.dtype,), elements, definitions=macros)
    return [CudaKernel((launch,))]


SHARED_BYTES, MOST_THREADS = 216 << 10, 1024
"""Shared memory and threads of a block that adds in shared memory."""
MIN_POINTS = 1 << 14
"""Minimum points. A block of fewer points has fewer summands than sums, each of which it adds to global memory."""


def hash_grid_add(target: Target, ct: Any, points: Any, levels: Any, rows: int, along: Ints) -> list[CudaKernel]:
    """Sums of integers, for many points those of small levels in shared memory.

    `room` bits hold how much larger a sum can be than a summand.
    """
    shared_sums = min(SHARED_BYTES, target.shared) // 8 if points.shape[0] >= MIN_POINTS else 0
    macros = _definitions(points, levels, ct.shape[2], ct.dtype.itemsize)
    macros |= {"SHARED_SUMS": shared_sums, "THREADS": MOST_THREADS}
    elements, room = rows * ct.shape[2], points.shape[0].bit_length() + len(along)
    (count,) = lengths(elements=elements)
    scratch = memory_layout("SCRATCH", {"SUMS": (8, count), "LARGEST": (8, 1)}, count)
    numbers, vectors = (points.shape[0], axis_bits(along), elements, room), ct.size // macros["WIDTH"]

    def launch(name: str, elements: int | None = None, **size: Any) -> CudaLaunch:
        return CudaLaunch(
            "index/hash_grid.cu",
            f"hash_grid_add_{name}",
            numbers,
            (ct.dtype,),
            elements,
            definitions=macros,
            layouts=(scratch,),
            **size,
        )

    groups = levels.shape[0] * ct.shape[2]
    parts = max(1, 2 * target.multiprocessors // groups)  # sums of about half of the levels fit
    in_shared = launch("shared", blocks=(parts, groups), threads=MOST_THREADS, shared=8 * shared_sums)
    launches = (
        launch("clear", elements + 1),
        launch("largest", vectors),
        *([in_shared] if shared_sums else []),
        launch("points", 2 * ct.size),
        launch("finish", elements),
    )
    return [CudaKernel(launches, scratch)]


register("hash_grid", "cuda", hash_grid)
register("hash_grid_add", "cuda", hash_grid_add)
