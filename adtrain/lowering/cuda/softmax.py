"""softmax and its logarithm: `reduce/softmax.cu` and `reduce/softmax_columns.cu`."""

from __future__ import annotations

from typing import Any

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.registry import register
from adtrain.core.target import Target
from adtrain.lowering.cuda.reduce import MIN_SHORT_ROWS, SHORT_ROW, WARP, thread_per_row, vector_width
from adtrain.lowering.cuda.rows import MAX_REGISTER_ROW, MAX_TEAM, rows_in_registers
from adtrain.lowering.shapes import split_at

BLOCK = 256
"""Threads per block."""


def softmax(logarithm: bool, target: Target, x: Any, axis: int) -> list[CudaKernel]:
    """The candidates for softmax, or for its logarithm."""
    outer, length, inner = split_at(x.shape, axis)
    macros = {"LOGARITHM": int(logarithm)}
    with_length = {**macros, "LENGTH": length}

    def launch(name: str, numbers: tuple[int, ...], definitions: dict[str, int] = macros, **work: Any) -> CudaLaunch:
        file = "reduce/softmax_columns.cu" if name.endswith("columns") else "reduce/softmax.cu"
        return CudaLaunch(file, name, numbers, (x.dtype,), definitions=definitions, **work)

    found: list[CudaKernel] = []
    if inner == 1:
        if (outer >= MIN_SHORT_ROWS or target.by_member) and thread_per_row(length, x.dtype.itemsize):
            blocks = -(-outer // BLOCK)
            found.append(CudaKernel((launch("softmax_rows", (outer,), with_length, blocks=blocks, threads=BLOCK),)))
        found += rows_in_registers(launch("softmax_team", (outer, length)), outer, length)
        static = 2 * WARP * x.dtype.itemsize  # of softmax_long: the maximum and the sum of each warp
        cached = min(MAX_REGISTER_ROW, target.shared - static)
        long = launch("softmax_long", (outer, length, cached), blocks=outer, threads=MAX_TEAM, shared=cached)
        found.append(CudaKernel((long,)))
    if length * x.dtype.itemsize <= SHORT_ROW:
        found.append(CudaKernel((launch("softmax_columns", (outer, inner), with_length, elements=outer * inner),)))
    wide = {**macros, "WIDTH": vector_width(inner, x.dtype.itemsize)}
    blocks = -(-outer * inner // WARP)
    long = launch("softmax_long_columns", (outer, length, inner), wide, blocks=blocks, threads=2 * BLOCK)
    return [*found, CudaKernel((long,))]


register("softmax", "cuda", lambda target, x, axis: softmax(False, target, x, axis))
register("log_softmax", "cuda", lambda target, x, axis: softmax(True, target, x, axis))
