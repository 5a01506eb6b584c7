"""The CUDA kernels for `argsort` (`index/sort.cu`)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from adtrain.core.kernel import MAX_GRID, CudaKernel, CudaLaunch
from adtrain.core.memory_layout import memory_layout
from adtrain.core.registry import register
from adtrain.core.target import Target
from adtrain.lowering.cuda.reduce import WARP, power_of_two

MAX_TILE = 1024
"""Maximum of positions that a block sorts: one for each thread."""
INDEX = np.dtype(np.int64)


def argsort(target: Target, x: Any, count: int, descending: bool) -> list[CudaKernel]:
    """The only candidate: sorts tiles, then merges pairs of runs until one run is left."""
    rows, length = math.prod(x.shape[:-1]), x.shape[-1]
    tile = min(max(power_of_two(length), WARP), MAX_TILE)
    tiles = -(-length // tile)
    launches = 1 + max(tiles - 1, 0).bit_length()
    macros = {"TILE": tile, "DESCENDING": int(descending)}
    scratch = memory_layout("SCRATCH", {"LISTS": (INDEX.itemsize, min(launches - 1, 2) * rows * length)})

    def launch(name: str, *numbers: int, **work: Any) -> CudaLaunch:
        sizes = (rows, length, count, *numbers, launches)
        dtypes = x.dtype, INDEX
        return CudaLaunch("index/sort.cu", name, sizes, dtypes, definitions=macros, layouts=(scratch,), **work)

    first = launch("sort_tiles", blocks=min(rows * tiles, MAX_GRID[0]), threads=tile)
    merges = [launch("merge_runs", tile << i - 1, i, elements=rows * length) for i in range(1, launches)]
    return [CudaKernel((first, *merges), scratch)]


register("argsort", "cuda", argsort)
