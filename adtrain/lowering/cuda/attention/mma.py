"""Attention of float32 on tensor cores by mma.sync: `attention/mma_pack.cu`, `mma_forward.cu`, `mma_backward.cu`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.precision import FULL
from adtrain.core.target import Target
from adtrain.lowering.cuda.attention.problem import Candidates, Problem
from adtrain.lowering.cuda.reduce import WARP

CAPABILITY = (8, 0)
"""The lowest compute capability with the instructions."""
GROUP, PACK_THREADS = 64, 256
"""Rows with one scale, and threads of a block, in attention/mma_pack.cu."""


class Tile(NamedTuple):
    """The macros ROWS, WARPS, OTHERS, STAGES, RESIDENT and AT_ONCE of attention/mma.cuh."""

    rows: int
    warps: int
    others: int
    stages: int
    resident: int = 1
    at_once: int = 1

    @property
    def block(self) -> int:
        """Rows of the result that a block computes."""
        return self.rows * self.warps

    def shared(self, width: int, terms: int, own: int) -> int:
        """Bytes of shared memory for ``own`` tiles of the block's rows and two of the others in each stage."""
        rows = 2 * terms * (padded(width) + 8) * (own * self.block + 2 * self.stages * self.others)
        return rows + 2 * 4 * self.stages * self.others  # and two numbers of each query

    @property
    def definitions(self) -> dict[str, int]:
        return {name.upper(): value for name, value in self._asdict().items()}


FORWARD_TILES = (Tile(32, 4, 32, 2),)
KEY_TILES = (Tile(32, 4, 32, 2),)
QUERY_TILES = (Tile(32, 4, 32, 2),)
MAX_SLICE = 128


def padded(width: int) -> int:
    """The width of packed rows."""
    return -(-width // 16) * 16


def candidates(target: Target, problem: Problem) -> Candidates | None:
    if target.capability < CAPABILITY or problem.dtype != np.float32:
        return None
    make = _backward if problem.gradient else _forward
    kernels = make(target, problem)
    return Candidates(1e-9, kernels) if kernels else None


def fitting(target: Target, problem: Problem, tiles: tuple[Tile, ...], own: int) -> list[Tile]:
    """The tiles that fit into shared memory, with ``own`` arrays of the block's rows."""
    width, terms = problem.lengths.width, terms_of(problem.precision)
    return [tile for tile in tiles if tile.shared(width, terms, own) <= target.shared]


def terms_of(precision: str) -> int:
    """16-bit numbers that an operand is the sum of."""
    return 2 if precision == FULL else 1


def direct(problem: Problem) -> bool:
    """Whether the kernels round what they load, so that nothing is packed."""
    return problem.precision == "bfloat16"


def _pack(problem: Problem) -> tuple[CudaLaunch, int]:
    """The launch that scales and splits the operands, and bytes of scratch memory."""
    x = problem.lengths
    query_groups, key_groups = (x.batch * -(-length // GROUP) for length in (x.queries, x.keys))
    groups = (0 if direct(problem) else 2 * key_groups) + (0 if not problem.gradient else query_groups if direct(problem) else 2 * query_groups)
    scratch = 0 if direct(problem) else groups * (GROUP * terms_of(problem.precision) * padded(x.width) * 2 + 16)
    if problem.gradient:
        scratch += 2 * 4 * query_groups * GROUP
    launch = CudaLaunch(
        "attention/mma_pack.cu", "attention_pack", problem.numbers, (problem.dtype,),
        blocks=groups, threads=PACK_THREADS,
        definitions={**problem.definitions, "GRADIENT": int(problem.gradient), "DIRECT": int(direct(problem))},
        operands=(*problem.inputs, *(problem.kept if problem.gradient else ())),
    )  # fmt: skip
    return launch, scratch


def _launch(
    problem: Problem, tile: Tile, name: str, length: int, own: int, results: tuple[int, ...], slice_: int = 0
) -> CudaLaunch:
    """A launch of a block for each ``tile.block`` of ``length`` rows of each head, and each slice of columns."""
    x = problem.lengths
    slices = -(-padded(x.width) // slice_) if slice_ else 1
    return CudaLaunch(
        f"attention/mma_{'backward' if problem.gradient else 'forward'}.cu", name, problem.numbers, (problem.dtype,),
        blocks=x.batch * -(-length // tile.block) * slices,
        threads=tile.warps * WARP,
        shared=tile.shared(x.width, terms_of(problem.precision), own),
        definitions={**problem.definitions, **tile.definitions, "DIRECT": int(direct(problem)), **({"SLICE": slice_} if slice_ else {})},
        operands=(*problem.inputs, *((problem.kept[2],) if problem.gradient else ()), *problem.more, *results),
    )  # fmt: skip


def _forward(target: Target, problem: Problem) -> list[CudaKernel]:
    pack, scratch = _pack(problem)
    tiles = fitting(target, problem, FORWARD_TILES, 1)
    length, results = problem.lengths.queries, problem.results
    first = () if direct(problem) else (pack,)
    return [CudaKernel((*first, _launch(problem, x, "attention_mma", length, 1, results)), scratch) for x in tiles]


def _backward(target: Target, problem: Problem) -> list[CudaKernel]:
    pack, scratch = _pack(problem)
    x, (by_q, by_k, by_v) = problem.lengths, problem.results
    kernels = []
    for of_keys in fitting(target, problem, KEY_TILES, 2):
        for of_queries in fitting(target, problem, QUERY_TILES, 2):
            width = padded(x.width)
            keys = _launch(problem, of_keys, "attention_mma_grad_keys", x.keys, 2, (by_k, by_v), min(width, MAX_SLICE))
            queries = _launch(
                problem, of_queries, "attention_mma_grad_queries", x.queries, 2, (by_q,), min(width, MAX_SLICE)
            )
            kernels.append(CudaKernel((pack, keys, queries), scratch))
    return kernels
