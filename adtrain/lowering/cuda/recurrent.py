"""Recurrent networks and their gradients: `rnn/recurrent.cu`, `rnn/recurrent_grad.cu`, or those of `grid_recurrent`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from adtrain.core.kernel import MAX_GRID, CudaKernel, CudaLaunch
from adtrain.core.memory_layout import MemoryLayout, memory_layout
from adtrain.core.registry import CudaRule, register
from adtrain.core.target import Target
from adtrain.lowering.cuda.grid_recurrent import GridDivision, cell_macros, grid_kernel
from adtrain.lowering.cuda.reduce import VECTOR, WARP
from adtrain.lowering.shapes import RECURRENT, RecurrentLengths, reads_all_cotangents, recurrent_lengths

MIN_CLUSTER_CAPABILITY = (9, 0)
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
"""Of a multiprocessor, in float32: half of its peak."""
L2_BYTES_PER_CYCLE, L2_BYTES_PER_CYCLE_GRADIENT = 11, 6
"""Of a multiprocessor that reads its part of the weight in each step. The gradient reads columns."""
EXCHANGE_BYTES = 32
"""Of the barriers of `Exchange` in `rnn/recurrent.cuh`."""
MAX_RESIDENT = 2
"""Most candidates with the weight in registers. They differ in the blocks of a cluster or in the rows."""


@dataclass(frozen=True)
class Division:
    """How the work is divided; see `rnn/recurrent.cuh`. The fields from `resident` on are its macros."""

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
    clusters = CLUSTERS if target.capability >= MIN_CLUSTER_CAPABILITY else CLUSTERS[:1]
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
    }  # fmt: skip
    if gradient:
        macros |= {"BUFFERS": division.buffers, "ALL": int(reads_all_cotangents(cell, types))}
    launch = CudaLaunch(
        f"rnn/{name}.cu",
        name,
        (lengths.rows, lengths.length, int(reverse)),
        (types[0].dtype,),
        blocks=division.blocks,
        threads=division.threads,
        shared=division.shared,
        definitions=macros,
    )
    return CudaKernel((launch,))


def _in_clusters(target: Target, gradient: bool, *types: Any) -> list[Division]:
    """The MAX_RESIDENT best divisions with the weight in registers, and the best one with the weight in memory."""
    found = divisions(target, recurrent_lengths(*types), types[0].dtype.itemsize, gradient)
    by_time = sorted(found, key=lambda d: d.cycles(target))
    best = {(d.cluster, d.rows): d for d in reversed(by_time) if d.resident}
    resident = sorted(best.values(), key=lambda d: d.cycles(target))[:MAX_RESIDENT]
    return [*resident, *[d for d in by_time if not d.resident][:1]]


def _over_grid(target: Target, cell: str, gradient: bool, *types: Any) -> tuple[GridDivision | None, bool]:
    """The division over the whole grid, if it fits, and whether its estimate is the shortest."""
    grid = GridDivision(cell, recurrent_lengths(*types), gradient)
    if not grid.fits(target, types[0].dtype):
        return None, False
    return grid, grid.cycles(target) < min(d.cycles(target) for d in _in_clusters(target, gradient, *types))


def _rule(cell: str, gradient: bool) -> CudaRule:
    def candidates(target: Target, *types: Any, reverse: bool) -> list[CudaKernel]:
        """Those of `_in_clusters`, and the one over the grid, which comes first if its estimate is the shortest."""
        clusters = [kernel(cell, division, types, reverse) for division in _in_clusters(target, gradient, *types)]
        grid, is_first = _over_grid(target, cell, gradient, *types)
        found = [] if grid is None else [grid_kernel(grid, target, types, reverse)]
        return [*found, *clusters] if is_first else [*clusters, *found]

    return candidates


def _weight_grad_rule(cell: str) -> CudaRule:
    def candidates(target: Target, *types: Any, reverse: bool, **others: Any) -> list[CudaKernel]:
        """The one over the whole grid, where the gradient without the weight's prefers it."""
        grid, is_first = _over_grid(target, cell, True, *types)
        return [grid_kernel(replace(grid, weight_grad=True), target, types, reverse)] if grid and is_first else []

    return candidates


for _cell in RECURRENT:
    register(_cell, "cuda", _rule(_cell, gradient=False))
    register(f"{_cell}_grad", "cuda", _rule(_cell, gradient=True))
    register(f"{_cell}_weight_grad", "cuda", _weight_grad_rule(_cell))
