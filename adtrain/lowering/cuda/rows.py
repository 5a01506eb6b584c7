"""Rows in registers: each in the lanes of a warp or the threads of a block."""

from __future__ import annotations

from dataclasses import replace

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.lowering.cuda.reduce import WARP, power_of_two, vector_width

MAX_REGISTER_ROW = 64 << 10
"""Bytes of a row that the registers of a block hold."""
MAX_WARP_ROW, THREAD_BYTES = 4096, 64
"""Maximum bytes of a row for the lanes of a warp; bytes of a row for each thread."""
MIN_TEAM, MAX_TEAM = 8, 512
"""Minimum of threads that share a row, if it has that many vectors; maximum of threads."""


def rows_in_registers(launch: CudaLaunch, rows: int, length: int) -> list[CudaKernel]:
    """The candidates for rows in the registers of a team of threads; none if rows are too long.

    A thread has ITEMS vectors of WIDTH elements. A TEAM is some lanes of a warp, or a block.

    Args:
        launch: the kernel, its numbers, and its definitions without TEAM, ITEMS and WIDTH.
        rows: number of rows.
        length: elements of a row, or 0 if the elements are not rows.
    """
    itemsize = launch.dtypes[0].itemsize
    size = length * itemsize
    if not 0 < size <= MAX_REGISTER_ROW:
        return []
    width = vector_width(length, itemsize)
    vectors = length // width
    team = lanes_of_row(vectors, size) if size <= MAX_WARP_ROW else min(threads_of_row(size), MAX_TEAM)
    macros = {**launch.definitions, "TEAM": team, "ITEMS": -(-vectors // team), "WIDTH": width}
    by_blocks = CudaKernel((replace(launch, definitions=macros, blocks=rows, threads=team),))
    if team > WARP:
        return [by_blocks]
    return [CudaKernel((replace(launch, definitions=macros, elements=rows * team),)), by_blocks]


def lanes_of_row(vectors: int, size: int) -> int:
    """The lanes of a warp that share a row of so many vectors and bytes."""
    return min(power_of_two(vectors), max(MIN_TEAM, min(threads_of_row(size), WARP)))


def threads_of_row(size: int) -> int:
    """Threads that have THREAD_BYTES of a row of `size` bytes."""
    return power_of_two(-(-size // THREAD_BYTES))
