"""Recurrent networks and their gradients: by clusters (`rnn/recurrent.cu`), or large ones over the grid, with a matrix
product by WGMMA in each step (`rnn/grid_recurrent.cu`, `rnn/grid_recurrent_grad.cu`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from adtrain.core.kernel import (
    HOPPER,
    MAX_GRID,
    WARP,
    Arrays,
    CudaKernel,
    CudaLaunch,
    MemoryLayout,
    Target,
    lengths,
    memory_layout,
    register,
)
from adtrain.core.precision import FULL
from adtrain.lowering.cuda.reduce import VECTOR
from adtrain.lowering.shapes import RECURRENT, RecurrentLengths, reads_all_cotangents, recurrent_lengths

CLUSTERS = (1, 2, 4, 8)
"""Blocks of a cluster. 8 is the maximum on every GPU that has clusters (CUDA C++ Programming Guide)."""
CLUSTERED = 0.94
"""The fraction of the multiprocessors that clusters of 4 or more can use: each lies in one group of multiprocessors."""
REGISTERS, MAX_REGISTERS = 65536, 255
"""Registers of a multiprocessor and of a thread."""
OTHER_REGISTERS = 56
"""Registers of a thread besides weights and sums."""
THREADS = (256, 512)
"""Most threads of a block."""
STEP_CYCLES, CLUSTER_CYCLES = 700, 500
"""Estimated cycles of a step without its products, and of a barrier of a cluster."""
FMA_PER_CYCLE = 64
"""Float32 FMAs of a multiprocessor in a cycle: half of its peak."""
L2_BYTES_PER_CYCLE, L2_BYTES_PER_CYCLE_GRADIENT = 11, 6
"""Bytes that a multiprocessor reads in a cycle, if it reads its part of the weight in each step. The gradient reads
columns."""
EXCHANGE_BYTES = 32
"""Bytes of the barriers of `Exchange` in `rnn/recurrent.cu`."""
MAX_RESIDENT = 2
"""Most candidates with the weight in registers. They differ in the blocks of a cluster or in the rows."""


@dataclass(frozen=True)
class Division:
    """How the work is divided; see `rnn/recurrent.cu`. The fields from `resident` on are its macros."""

    lengths: RecurrentLengths
    gradient: bool
    itemsize: int
    resident: bool
    cluster: int
    rows: int
    units: int
    slices: int
    threads: int

    @property
    def inner(self) -> int:
        """Numbers that each product adds."""
        return self.lengths.sums if self.gradient else self.lengths.hidden

    @property
    def outputs(self) -> int:
        """Products for each hidden unit."""
        return 1 if self.gradient else self.lengths.sums // self.lengths.hidden

    @property
    def own(self) -> int:
        """Hidden units of a block."""
        return -(-self.lengths.hidden // self.cluster)

    @property
    def passes(self) -> int:
        return -(-self.own // (self.threads // self.slices * self.units))

    @property
    def pitch(self) -> int:
        """Numbers of a row in shared memory."""
        at_once = self.slices * VECTOR // self.itemsize
        return -(-self.inner // at_once) * at_once

    @property
    def buffers(self) -> int:
        """Buffers of what the blocks exchange. In a large gradient a second barrier costs less than a second buffer."""
        return 2 if self.resident or not self.gradient else 1

    @property
    def shared(self) -> MemoryLayout:
        barriers = EXCHANGE_BYTES if self.resident and self.cluster > 1 else 0
        buffers = self.rows * self.pitch * self.itemsize, self.buffers
        return memory_layout("SHARED", {"BUFFERS": buffers, "BARRIERS": (1, barriers)})

    @property
    def blocks(self) -> int:
        return -(-self.lengths.rows // self.rows) * self.cluster

    @property
    def registers(self) -> int:
        """Estimated registers of a thread."""
        weights = self.pitch // self.slices if self.resident else VECTOR // self.itemsize
        numbers = self.units * self.outputs * (weights + self.rows) + self.rows * VECTOR // self.itemsize
        return numbers * self.itemsize // 4 + OTHER_REGISTERS

    def fits(self, target: Target) -> bool:
        if self.resident and self.passes > 1:
            return False
        registers = min(MAX_REGISTERS, REGISTERS // self.threads)
        return self.registers <= registers and self.shared <= target.shared and self.blocks <= MAX_GRID[0]

    def cycles(self, target: Target) -> float:
        """Estimated cycles of a step, times the waves of blocks."""
        fma = self.passes * self.rows * self.units * self.outputs * self.pitch / self.slices * self.threads
        loads = self.passes * self.rows * self.pitch / self.slices * self.threads  # of shared memory, 32 a cycle
        speed = L2_BYTES_PER_CYCLE_GRADIENT if self.gradient else L2_BYTES_PER_CYCLE
        weights = 0 if self.resident else self.own * self.outputs * self.pitch * self.itemsize / speed
        usable = int(target.multiprocessors * (CLUSTERED if self.cluster > 2 else 1)) // self.cluster * self.cluster
        step = STEP_CYCLES + (CLUSTER_CYCLES if self.cluster > 1 else 0)
        work = max(fma * self.itemsize / 4 / FMA_PER_CYCLE, loads * self.itemsize / 4 / WARP, weights)
        return (step + work) * -(-self.blocks // usable)


def divisions(target: Target, lengths: RecurrentLengths, itemsize: int, gradient: bool) -> Iterator[Division]:
    """All divisions that fit on the target."""
    clusters = CLUSTERS if target.capability >= HOPPER else CLUSTERS[:1]
    sizes = product((True, False), clusters, (1, 2, 4, 8, 16, 32), (1, 2, 4), (8, 16, 32), THREADS)
    for resident, cluster, rows, units, slices, most in sizes:
        own = -(-lengths.hidden // cluster)
        if rows * units > slices or units > own or rows > max(lengths.rows, 1) * 2 - 1:
            continue
        threads = min(-(-(-(-own // units) * slices) // WARP) * WARP, most)
        division = Division(lengths, gradient, itemsize, resident, cluster, rows, units, slices, threads)
        if division.fits(target):
            yield division


def kernel(cell: str, division: Division, types: Sequence[Any], reverse: bool) -> CudaKernel:
    """The launch of a cell, or of its gradient, with this division, for arguments of these types."""
    gradient, lengths = division.gradient, division.lengths
    name = "recurrent_grad" if gradient else "recurrent"
    macros = cell_macros(cell) | {
        "HIDDEN": lengths.hidden, "RESIDENT": int(division.resident), "CLUSTER": division.cluster,
        "ROWS": division.rows, "UNITS": division.units, "SLICES": division.slices, "THREADS": division.threads,
        "GRADIENT": int(gradient),
    }  # fmt: skip
    if gradient:
        macros |= {"BUFFERS": division.buffers, "ALL": int(reads_all_cotangents(cell, types))}
    launch = CudaLaunch(
        "rnn/recurrent.cu",
        name,
        (lengths.rows, lengths.length, int(reverse)),
        (types[0].dtype,),
        blocks=division.blocks,
        threads=division.threads,
        shared=division.shared,
        definitions=macros,
    )
    return CudaKernel((launch,))


DTYPES = (np.dtype(np.float32),)
"""The types of these kernels."""
TILE_ROWS, TILE_K, STAGES = 128, 64, 3
"""Rows and K of a packed tile, and stages of the pipeline, as in `rnn/grid.cuh`."""
ROW_BYTES, SCALE_BYTES = 128, 1024
"""Bytes of a row of a term of a packed tile; bytes of all scales in a packed tile that blocks exchange."""
TILE_N = {"lstm": 128, "gru": 96, "rnn_tanh": 64}
"""Columns of a block's product: all gates of 32 hidden units, or of 64. Hidden states of rnn_relu may be infinite;
float16 terms would turn them into NaN."""
GRADIENT_TILE_N, SPLITS = 128, 4
GRID_THREADS, PACK_THREADS, CONSUMER_WARPS = 384, 256, 8
ALIGNMENT, MAXIMA, PIPELINE_BYTES = 1024, 16, 96
"""Alignment of the stages in shared memory, in bytes; maxima of warps; bytes of the stages' barriers."""
WEIGHT_GRAD_TILE, SCALED_COLUMNS = 128, 32
"""Rows and columns of a tile of the gradient of weight_hh; columns of its operands with one scale."""
TILE_CYCLES, GRID_STEP_CYCLES, GRADIENT_STEP_CYCLES = {1: 1500, 2: 3600}, 14000, 26000
"""Estimated cycles of TILE_K of a product of 128 x 128, by the terms of an operand, and of a step besides the product:
forward, gradient."""


@dataclass(frozen=True)
class GridDivision:
    """How the work is divided; see `rnn/grid.cuh`.

    Attributes:
        terms: the float16 terms of an operand: two in full precision, else one.
        weight_grad: whether the gradients of weight_hh and the biases are computed too, by `rnn/grid_weight_grad.cu`.
    """

    cell: str
    lengths: RecurrentLengths
    gradient: bool
    terms: int = 2
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
        stage = self.terms * ROW_BYTES * (TILE_ROWS + self.tile_n) + SCALE_BYTES
        numbers = {"KEPT": TILE_ROWS * self.kept_units, "COLUMN_SCALES": self.tile_n, "MAXIMA": MAXIMA}
        of_numbers = {name: (4, count) for name, count in numbers.items()}
        arrays = {"STAGES": (stage, STAGES), **of_numbers, "PIPELINE": (1, PIPELINE_BYTES)}
        return memory_layout("SHARED", arrays, alignment=ALIGNMENT)

    def scratch(self, target: Target) -> MemoryLayout:
        """The arrays of `Layout` and `WeightGradInputs` in `rnn/grid.cuh`."""
        groups, steps = lengths(groups=self.groups, steps=self.lengths.length * self.groups)
        row, k_tiles, split = self.terms * ROW_BYTES, self.inner // TILE_K, int(self.splits > 1)
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
        if target.capability != HOPPER or dtype != DTYPES[0] or self.cell not in TILE_N or not self.groups:
            return False
        whole = self.lengths.hidden % GRADIENT_TILE_N == 0 and self.inner >= self.splits * TILE_K
        return whole and self.parts <= target.multiprocessors and self.shared <= target.shared

    def cycles(self, target: Target) -> float:
        """Estimated cycles of a step, times the rounds of groups."""
        k_tiles = -(-self.inner // TILE_K // self.splits)
        product = k_tiles * TILE_CYCLES[self.terms] * (TILE_ROWS + self.tile_n) / (2 * TILE_ROWS)
        step = product + (GRADIENT_STEP_CYCLES if self.gradient else GRID_STEP_CYCLES)
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
    cell, lengths, scratch = division.cell, division.lengths, division.scratch(target)
    macros = cell_macros(cell) | {
        "HIDDEN": lengths.hidden, "TILE_N": division.tile_n, "SPLITS": division.splits,
        "OPERAND_TERMS": division.terms,
        "GRADIENT": int(division.gradient), "WEIGHT_GRAD": int(division.weight_grad),
        "PIPELINE_BYTES": PIPELINE_BYTES,
    }  # fmt: skip

    def launch(name: str, *numbers: int, definitions: dict[str, int] | None = None, **more: Any) -> CudaLaunch:
        own = macros | (definitions or {})
        return CudaLaunch(f"rnn/{name}.cu", name, (lengths.rows, *numbers), DTYPES, definitions=own, **more)

    # The positions of weight_hh and h0: ct_c lies between them in the gradient of an LSTM, biases in the forward pass.
    weight, h0 = 1, 2 + (cell == "lstm") if division.gradient else 3 + (cell == "gru")
    pack = launch(
        "grid_pack",
        blocks=4 * target.multiprocessors,
        threads=PACK_THREADS,
        layouts=(scratch, division.shared),
        operands=(weight, h0),
    )
    # The gradients of weight_hh and the biases follow all others.
    biases, states = 2 if cell == "gru" else 1, 2 if cell == "lstm" else 1
    first = len(types) + biases + states
    size = {"threads": GRID_THREADS, "shared": division.shared, "layouts": (scratch,)}
    steps = launch(
        "grid_recurrent_grad" if division.gradient else "grid_recurrent",
        lengths.length,
        int(reverse),
        definitions={"ALL": int(reads_all_cotangents(cell, types))} if division.gradient else None,
        blocks=division.at_once(target) * division.parts,
        operands=tuple(range(first)) if division.weight_grad else None,
        cooperative=True,
        **size,
    )
    if not division.weight_grad:
        return CudaKernel((pack, steps), scratch)
    splits = division.weight_grad_splits(target)
    multiply = launch(
        "grid_weight_grad",
        lengths.length,
        definitions={"WEIGHT_GRAD_SPLITS": splits},
        blocks=division.weight_grad_tiles * splits,
        operands=tuple(range(first, first + 1 + biases)),
        cooperative=splits > 1,
        **size,
    )
    return CudaKernel((pack, steps, multiply), scratch)


def _in_clusters(target: Target, gradient: bool, *types: Any) -> list[Division]:
    """The MAX_RESIDENT best divisions with the weight in registers, and the best one with the weight in memory."""
    found = divisions(target, recurrent_lengths(*types), types[0].dtype.itemsize, gradient)
    by_time = sorted(found, key=lambda d: d.cycles(target))
    best = {(d.cluster, d.rows): d for d in reversed(by_time) if d.resident}
    resident = sorted(best.values(), key=lambda d: d.cycles(target))[:MAX_RESIDENT]
    return [*resident, *[d for d in by_time if not d.resident][:1]]


def _divisions(
    cell: str, gradient: bool, target: Target, *types: Any, precision: str = FULL
) -> list[Division | GridDivision]:
    """Those of `_in_clusters`, and the one over the grid if it fits. It is first if its estimate is the shortest."""
    clusters = _in_clusters(target, gradient, *types)
    grid = GridDivision(cell, recurrent_lengths(*types), gradient, 2 if precision == FULL else 1)
    if not grid.fits(target, types[0].dtype):
        return [*clusters]
    is_first = grid.cycles(target) < min(d.cycles(target) for d in clusters)
    return [grid, *clusters] if is_first else [*clusters, grid]


def _candidates(
    cell: str, gradient: bool, target: Target, *types: Any, reverse: bool, **params: Any
) -> list[CudaKernel]:
    return [
        grid_kernel(d, target, types, reverse) if isinstance(d, GridDivision) else kernel(cell, d, types, reverse)
        for d in _divisions(cell, gradient, target, *types, **params)
    ]


def _weight_grad(
    cell: str, target: Target, *types: Any, reverse: bool, precision: str = FULL, **others: Any
) -> list[CudaKernel]:
    """The kernel over the grid, where the gradient without the weight's prefers it."""
    best = next(iter(_divisions(cell, True, target, *types, precision=precision)), None)
    grids = [replace(best, weight_grad=True)] if isinstance(best, GridDivision) else []
    return [grid_kernel(grid, target, types, reverse) for grid in grids]


for _cell in RECURRENT:
    register(_cell, "cuda", partial(_candidates, _cell, False))
    register(f"{_cell}_grad", "cuda", partial(_candidates, _cell, True))
    register(f"{_cell}_weight_grad", "cuda", partial(_weight_grad, _cell))
