"""The hash encoding of points: `index/hash_grid.cu`."""

from __future__ import annotations

from typing import Any

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.memory_layout import lengths, memory_layout
from adtrain.core.registry import register
from adtrain.core.target import Target
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
    elements = points.shape[0] * levels.shape[0] * table.shape[1] // macros["WIDTH"]
    numbers = points.shape[0], axis_bits(along)
    launch = CudaLaunch("index/hash_grid.cu", "hash_grid", numbers, (table.dtype,), elements, definitions=macros)
    return [CudaKernel((launch,))]


def hash_grid_add(target: Target, ct: Any, points: Any, levels: Any, rows: int, along: Ints) -> list[CudaKernel]:
    """The only candidate: sums of integers. `room` bits hold how much larger a sum can be than a summand."""
    macros = _definitions(points, levels, ct.shape[2], ct.dtype.itemsize)
    elements, room = rows * ct.shape[2], points.shape[0].bit_length() + len(along)
    (count,) = lengths(elements=elements)
    scratch = memory_layout("SCRATCH", {"SUMS": (8, count), "LARGEST": (8, 1)}, count)
    numbers, vectors = (points.shape[0], axis_bits(along), elements, room), ct.size // macros["WIDTH"]
    work = {"clear": elements + 1, "largest": vectors, "points": ct.size, "finish": elements}
    launches = [
        CudaLaunch(
            "index/hash_grid.cu",
            f"hash_grid_add_{name}",
            numbers,
            (ct.dtype,),
            threads,
            definitions=macros,
            layouts=(scratch,),
        )
        for name, threads in work.items()
    ]
    return [CudaKernel(tuple(launches), scratch)]


register("hash_grid", "cuda", hash_grid)
register("hash_grid_add", "cuda", hash_grid_add)
