"""softmax and its logarithm: `reduce/softmax.cu` and `reduce/softmax_columns.cu`."""

from __future__ import annotations

from functools import partial
from typing import Any

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.registry import register
from adtrain.core.target import Target
from adtrain.lowering.cuda.reduce import MIN_SHORT_ROWS, SHORT_ROW, VECTOR, WARP, thread_per_row, vector_width
from adtrain.lowering.cuda.rows import MAX_REGISTER_ROW, MAX_TEAM, rows_in_registers
from adtrain.lowering.shapes import element_types, split_at

BLOCK = 256
"""Threads per block."""


def softmax(logarithm: bool, target: Target, x: Any, axis: int) -> list[CudaKernel]:
    """The candidates for softmax, or for its logarithm. ``x`` may be bfloat16 in memory, with rows of whole vectors."""
    outer, length, inner = split_at(x.shape, axis)
    dtypes = element_types(x.dtype)
    stored = dtypes[0] != x.dtype
    if stored and (inner > 1 or length * x.dtype.itemsize % VECTOR):
        return []
    macros = {"LOGARITHM": int(logarithm)}
    with_length = {**macros, "LENGTH": length}

    def launch(name: str, numbers: tuple[int, ...], definitions: dict[str, int] = macros, **work: Any) -> CudaLaunch:
        file = "reduce/softmax_columns.cu" if name.endswith("columns") else "reduce/softmax.cu"
        return CudaLaunch(file, name, numbers, dtypes, definitions=definitions, **work)

    found: list[CudaKernel] = []
    if inner == 1:
        if not stored and (outer >= MIN_SHORT_ROWS or target.by_member) and thread_per_row(length, x.dtype.itemsize):
            blocks = -(-outer // BLOCK)
            found.append(CudaKernel((launch("softmax_rows", (outer,), with_length, blocks=blocks, threads=BLOCK),)))
        found += rows_in_registers(launch("softmax_team", (outer, length)), outer, length)
        static = 2 * WARP * dtypes[0].itemsize  # of softmax_long: the maximum and the sum of each warp
        cached = min(MAX_REGISTER_ROW, target.shared - static)
        long = launch("softmax_long", (outer, length, cached), blocks=outer, threads=MAX_TEAM, shared=cached)
        found.append(CudaKernel((long,)))
    if stored:
        return found
    if length * x.dtype.itemsize <= SHORT_ROW:
        found.append(CudaKernel((launch("softmax_columns", (outer, inner), with_length, elements=outer * inner),)))
    wide = {**macros, "WIDTH": vector_width(inner, x.dtype.itemsize)}
    blocks = -(-outer * inner // WARP)
    long = launch("softmax_long_columns", (outer, length, inner), wide, blocks=blocks, threads=2 * BLOCK)
    return [*found, CudaKernel((long,))]


for _name, _logarithm in (("softmax", False), ("log_softmax", True)):
    register(_name, "cuda", partial(softmax, _logarithm))
    register(f"{_name}_bfloat16", "cuda", partial(softmax, _logarithm))
