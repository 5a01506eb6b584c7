"""Large recurrent networks, a matrix product by WGMMA in each step: `rnn/grid_recurrent.cu` and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.target import Target
from adtrain.lowering.shapes import RecurrentLengths, reads_all_cotangents

CAPABILITY = (9, 0)
"""The compute capability that has wgmma."""
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
        weight_grad: the gradient of weight_hh, too, by `rnn/grid_weight_grad.cu`.
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
    def shared(self) -> int:
        stage = TERMS * ROW_BYTES * (TILE_ROWS + self.tile_n) + SCALE_BYTES
        return ALIGNMENT + STAGES * stage + (TILE_ROWS * self.kept_units + self.tile_n + MAXIMA) * 4 + PIPELINE_BYTES

    def scratch(self, target: Target) -> int:
        """Bytes of `Layout` in `rnn/grid.cuh`."""
        of_group = self.parts + (self.tiles if self.splits > 1 else 0)
        counters = -(-(self.groups * of_group + self.weight_grad_tiles) * 4 // 1024) * 1024
        k_tiles = self.inner // TILE_K
        columns, buffers = self.tiles * self.tile_n, 2 * self.groups
        weight = k_tiles * TERMS * ROW_BYTES * columns
        exchanged = k_tiles * buffers * (TERMS * ROW_BYTES * TILE_ROWS + SCALE_BYTES)
        partial = buffers * self.parts * TILE_ROWS * self.tile_n * 4 if self.splits > 1 else 0
        return counters + weight + exchanged + partial + columns * 4 + self._weight_grad_scratch(target)

    def _weight_grad_scratch(self, target: Target) -> int:
        """Bytes of `WeightGradInputs` in `rnn/grid.cuh`, and of the partial sums of `rnn/grid_weight_grad.cu`."""
        if not self.weight_grad:
            return 0
        columns, steps = self.lengths.sums + self.lengths.hidden, self.lengths.length * self.groups
        scales = 2 * columns // SCALED_COLUMNS * 4
        of_biases = self.lengths.sums + (self.lengths.hidden if self.cell == "gru" else 0)
        bias_sums = self.groups * CONSUMER_WARPS * of_biases * 4
        partial = (self.weight_grad_splits(target) - 1) * self.weight_grad_tiles * WEIGHT_GRAD_TILE**2 * 4
        return steps * (columns // TILE_K * TERMS * ROW_BYTES * TILE_ROWS + scales) + bias_sums + partial

    def fits(self, target: Target, dtype: np.dtype) -> bool:
        if target.capability != CAPABILITY or dtype != np.float32 or self.cell not in TILE_N or not self.groups:
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
    """The launches that pack the weight, compute all steps, and multiply for the gradient of the weight."""
    lengths, dtypes = division.lengths, (types[0].dtype,)
    macros = cell_macros(division.cell) | {
        "HIDDEN": lengths.hidden, "TILE_N": division.tile_n, "SPLITS": division.splits,
        "GRADIENT": int(division.gradient), "WEIGHT_GRAD": int(division.weight_grad),
    }  # fmt: skip
    with_shared = macros | {"SHARED_BYTES": division.shared}
    gru = division.cell == "gru"
    # The positions of the arguments, and those of the gradients of weight_hh and the biases.
    weight, h0 = 1, (3 if division.cell == "lstm" else 2) if division.gradient else 4 if gru else 3
    biases = 2 if gru else 1
    first = len(types) + biases
    weight_grads = range(first, first + 1 + biases)
    pack = CudaLaunch(
        "rnn/grid_pack.cu",
        "grid_pack",
        (lengths.rows,),
        dtypes,
        blocks=4 * target.multiprocessors,
        threads=PACK_THREADS,
        definitions=macros,
        operands=(weight, h0),
    )
    name = "grid_recurrent_grad" if division.gradient else "grid_recurrent"
    of_steps = with_shared
    if division.gradient:
        of_steps = with_shared | {"ALL": int(reads_all_cotangents(division.cell, types))}
    states = 2 if division.cell == "lstm" else 1
    others = (i for i in range(weight_grads.stop + states) if i not in weight_grads)
    steps = CudaLaunch(
        f"rnn/{name}.cu",
        name,
        (lengths.rows, lengths.length, int(reverse)),
        dtypes,
        blocks=division.at_once(target) * division.parts,
        threads=THREADS,
        shared=division.shared,
        definitions=of_steps,
        operands=tuple(others) if division.weight_grad else None,
        cooperative=True,
    )
    if not division.weight_grad:
        return CudaKernel((pack, steps), division.scratch(target))
    splits = division.weight_grad_splits(target)
    weight_grad = CudaLaunch(
        "rnn/grid_weight_grad.cu",
        "grid_weight_grad",
        (lengths.rows, lengths.length),
        dtypes,
        blocks=division.weight_grad_tiles * splits,
        threads=THREADS,
        shared=division.shared,
        definitions=with_shared | {"WEIGHT_GRAD_SPLITS": splits},
        operands=tuple(weight_grads),
        cooperative=splits > 1,
    )
    return CudaKernel((pack, steps, weight_grad), division.scratch(target))
