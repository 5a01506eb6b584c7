"""Large recurrent networks, a matrix product by WGMMA in each step: `rnn/grid_recurrent.cu` and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.memory_layout import Arrays, MemoryLayout, lengths, memory_layout
from adtrain.core.target import Target
from adtrain.lowering.shapes import RecurrentLengths, reads_all_cotangents

CAPABILITY = (9, 0)
"""The compute capability that has wgmma."""
DTYPES = (np.dtype(np.float32),)
"""The types of these kernels."""
TILE_ROWS, TILE_K, TERMS, STAGES = 128, 64, 2, 3
"""As in `rnn/grid.cuh`."""
ROW_BYTES, SCALE_BYTES = 128, 1024
"""Of a row of a term of a packed tile; of all scales in a packed tile of what blocks exchange."""
TILE_N = {"lstm": 128, "gru": 96, "rnn_tanh": 64}
"""Columns of a block's product: all gates of 32 hidden units, or of 64. Hidden states of rnn_relu may be infinite;
float16 terms would turn them into NaN."""
GRADIENT_TILE_N, SPLITS = 128, 4
THREADS, PACK_THREADS, CONSUMER_WARPS = 384, 256, 8
ALIGNMENT, MAXIMA, PIPELINE_BYTES = 1024, 16, 96
"""Of the stages in shared memory; maxima of warps; bytes of the stages' barriers."""
WEIGHT_GRAD_TILE, SCALED_COLUMNS = 128, 32
"""Rows and columns of a tile of the gradient of weight_hh; columns of its operands with one scale."""
TILE_CYCLES, STEP_CYCLES, GRADIENT_STEP_CYCLES = 3600, 14000, 26000
"""Estimated cycles of TILE_K of a product of 128 x 128, and of a step besides the product: forward, gradient."""


@dataclass(frozen=True)
class GridDivision:
    """How the work is divided; see `rnn/grid.cuh`.

    Attributes:
        weight_grad: whether the gradients of weight_hh and the biases are computed too, by `rnn/grid_weight_grad.cu`.
    """

    cell: str
    lengths: RecurrentLengths
    gradient: bool
    weight_grad: bool = False

    @property
    def tile_n(self) -> int:
        return GRADIENT_TILE_N if self.gradient else TILE_N[self.cell]

    @property
    def splits(self) -> int:
        return SPLITS if self.gradient else 1

    @property
    def inner(self) -> int:
        """K of a step's product."""
        return self.lengths.sums if self.gradient else self.lengths.hidden

    @property
    def tiles(self) -> int:
        """Tiles of a group's product."""
        return (self.lengths.hidden if self.gradient else self.lengths.sums) // self.tile_n

    @property
    def parts(self) -> int:
        """Blocks that wait for each other."""
        return self.tiles * self.splits

    @property
    def groups(self) -> int:
        """Groups of rows."""
        return -(-self.lengths.rows // TILE_ROWS)

    def at_once(self, target: Target) -> int:
        """Groups that are computed at the same time."""
        return min(self.groups, target.multiprocessors // self.parts)

    @property
    def kept_units(self) -> int:
        """Hidden units of which a block keeps a number for each row, in shared memory."""
        if self.cell == "lstm":
            return self.tile_n // (self.splits if self.gradient else 4)
        return self.tile_n // self.splits if self.cell == "gru" and self.gradient else 0

    @property
    def weight_grad_tiles(self) -> int:
        return self.lengths.sums * self.lengths.hidden // WEIGHT_GRAD_TILE**2 if self.weight_grad else 0

    def weight_grad_splits(self, target: Target) -> int:
        """Splits of K, the rows of all steps, such that all blocks run at once."""
        return min(max(target.multiprocessors // self.weight_grad_tiles, 1), 2 * self.groups * self.lengths.length)

    @property
    def shared(self) -> MemoryLayout:
        stage = TERMS * ROW_BYTES * (TILE_ROWS + self.tile_n) + SCALE_BYTES
        numbers = {"KEPT": TILE_ROWS * self.kept_units, "COLUMN_SCALES": self.tile_n, "MAXIMA": MAXIMA}
        of_numbers = {name: (4, count) for name, count in numbers.items()}
        arrays = {"STAGES": (stage, STAGES), **of_numbers, "PIPELINE": (1, PIPELINE_BYTES)}
        return memory_layout("SHARED", arrays, alignment=ALIGNMENT)

    def scratch(self, target: Target) -> MemoryLayout:
        """The arrays of `Layout` and `WeightGradInputs` in `rnn/grid.cuh`."""
        groups, steps = lengths(groups=self.groups, steps=self.lengths.length * self.groups)
        row, k_tiles, split = TERMS * ROW_BYTES, self.inner // TILE_K, int(self.splits > 1)
        counters = groups * (self.parts + self.tiles * split) + self.weight_grad_tiles
        partial = 2 * self.parts * self.splits * split
        columns = (self.lengths.sums + self.lengths.hidden) * int(self.weight_grad)
        of_biases = (self.lengths.sums + self.lengths.hidden * int(self.cell == "gru")) * int(self.weight_grad)
        others = (self.weight_grad_splits(target) - 1) * self.weight_grad_tiles if self.weight_grad else 0
        arrays: Arrays = {
            "COUNTERS": (4, counters.rounded_up(1024 // 4)),
            "WEIGHT": (row * self.tile_n, k_tiles * self.tiles),
            "EXCHANGED": (row * TILE_ROWS + SCALE_BYTES, groups * (2 * k_tiles)),
            "PARTIAL_SUMS": (
                TILE_ROWS * self.tile_n * 4 // self.splits,
                groups * partial,
            ),
            "INVERSE_SCALES": (4, self.tiles * self.tile_n),
            "TILES": (row * TILE_ROWS, steps * (columns // TILE_K)),
            "SCALES": (4, steps * (2 * columns // SCALED_COLUMNS)),
            "BIAS_SUMS": (4, groups * (CONSUMER_WARPS * of_biases)),
            "WEIGHT_GRAD_SUMS": (16, others * WEIGHT_GRAD_TILE**2 // 4),
        }
        return memory_layout("SCRATCH", arrays, groups, steps)

    def fits(self, target: Target, dtype: np.dtype) -> bool:
        if target.capability != CAPABILITY or dtype != DTYPES[0] or self.cell not in TILE_N or not self.groups:
            return False
        whole = self.lengths.hidden % GRADIENT_TILE_N == 0 and self.inner >= self.splits * TILE_K
        return whole and self.parts <= target.multiprocessors and self.shared <= target.shared

    def cycles(self, target: Target) -> float:
        """Estimated cycles of a step, times the rounds of groups."""
        k_tiles = -(-self.inner // TILE_K // self.splits)
        product = k_tiles * TILE_CYCLES * (TILE_ROWS + self.tile_n) / (2 * TILE_ROWS)
        step = product + (GRADIENT_STEP_CYCLES if self.gradient else STEP_CYCLES)
        return step * -(-self.groups // self.at_once(target))


def cell_macros(cell: str) -> dict[str, int]:
    """The macros that say what a cell computes."""
    named = {"LSTM": "lstm", "GRU": "gru", "RELU": "rnn_relu"}
    return {macro: int(cell == name) for macro, name in named.items()} | {"GATED": int(cell in ("lstm", "gru"))}


def grid_kernel(division: GridDivision, target: Target, types: Sequence[Any], reverse: bool) -> CudaKernel:
    """The launches that pack the weight, compute all steps, and multiply for the gradient of the weight.

    Args:
        types: of the arguments of the cell, or of its gradient.
    """
    launches = [_pack(division, target), _steps(division, target, types, reverse)]
    if division.weight_grad:
        launches.append(_weight_grad(division, target, types))
    return CudaKernel(tuple(launches), division.scratch(target))


def _macros(division: GridDivision) -> dict[str, int]:
    return cell_macros(division.cell) | {
        "HIDDEN": division.lengths.hidden, "TILE_N": division.tile_n, "SPLITS": division.splits,
        "GRADIENT": int(division.gradient), "WEIGHT_GRAD": int(division.weight_grad),
        "PIPELINE_BYTES": PIPELINE_BYTES,
    }  # fmt: skip


def _weight_grad_positions(division: GridDivision, types: Sequence[Any]) -> range:
    """The positions of the gradients of weight_hh and the biases. They follow all others."""
    biases, states = 2 if division.cell == "gru" else 1, 2 if division.cell == "lstm" else 1
    first = len(types) + biases + states
    return range(first, first + 1 + biases)


def _pack(division: GridDivision, target: Target) -> CudaLaunch:
    # The positions of weight_hh and h0: ct_c lies between them in the gradient of an LSTM, biases in the forward pass.
    weight, h0 = 1, 2 + (division.cell == "lstm") if division.gradient else 3 + (division.cell == "gru")
    return CudaLaunch(
        "rnn/grid_pack.cu",
        "grid_pack",
        (division.lengths.rows,),
        DTYPES,
        blocks=4 * target.multiprocessors,
        threads=PACK_THREADS,
        definitions=_macros(division),
        layouts=(division.scratch(target), division.shared),
        operands=(weight, h0),
    )


def _steps(division: GridDivision, target: Target, types: Sequence[Any], reverse: bool) -> CudaLaunch:
    lengths, macros, operands = division.lengths, _macros(division), None
    if division.gradient:
        macros["ALL"] = int(reads_all_cotangents(division.cell, types))
    if division.weight_grad:
        operands = tuple(range(_weight_grad_positions(division, types).start))
    name = "grid_recurrent_grad" if division.gradient else "grid_recurrent"
    return CudaLaunch(
        f"rnn/{name}.cu",
        name,
        (lengths.rows, lengths.length, int(reverse)),
        DTYPES,
        blocks=division.at_once(target) * division.parts,
        threads=THREADS,
        shared=division.shared,
        definitions=macros,
        layouts=(division.scratch(target),),
        operands=operands,
        cooperative=True,
    )


def _weight_grad(division: GridDivision, target: Target, types: Sequence[Any]) -> CudaLaunch:
    splits = division.weight_grad_splits(target)
    return CudaLaunch(
        "rnn/grid_weight_grad.cu",
        "grid_weight_grad",
        (division.lengths.rows, division.lengths.length),
        DTYPES,
        blocks=division.weight_grad_tiles * splits,
        threads=THREADS,
        shared=division.shared,
        definitions=_macros(division) | {"WEIGHT_GRAD_SPLITS": splits},
        layouts=(division.scratch(target),),
        operands=tuple(_weight_grad_positions(division, types)),
        cooperative=splits > 1,
    )
