"""Attention of float32 on tensor cores by mma.sync: `attention/mma_pack.cu`, `mma_forward.cu`, `mma_backward.cu`.

The constants of the cost model were measured on an H200.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from adtrain.core.kernel import TENSOR_CORES, WARP, CudaKernel, CudaLaunch, MemoryLayout, Target, lengths, memory_layout
from adtrain.core.precision import FULL
from adtrain.lowering.cuda.attention.problem import LAUNCH, Candidates, Problem, waves

GROUP, PACK_THREADS = 64, 256
"""Rows with one scale, and threads of a block, in attention/mma_pack.cu."""
MAX_SLICE = 128
"""Most columns of the cotangents that a block computes."""
MAX_DIRECT = 64
"""Largest width of rows that kernels round themselves."""
BANDWIDTH = 2.6e12
"""Bytes per second that packing reads and writes."""
ONE_TERM = 2
"""Speed of products of one-term operands, over that of two-term operands."""
START = 2e-6
"""Seconds until the first tiles are in shared memory."""
MOST = 2
"""Candidates for each kernel."""


class Tile(NamedTuple):
    """The macros ROWS, WARPS, OTHERS and STAGES of attention/mma.cuh."""

    rows: int
    warps: int
    others: int
    stages: int

    @property
    def block(self) -> int:
        """Rows of the result that a block computes."""
        return self.rows * self.warps

    @property
    def definitions(self) -> dict[str, int]:
        return {name.upper(): value for name, value in self._asdict().items()}


class Part(NamedTuple):
    """One of the kernels.

    Args:
        name: of the function.
        own: operands of which a tile of the block's rows is in shared memory.
        sums: results of a row that stay in registers, as multiples of the width.
        scores: tiles of scores in registers.
        products: of rows by others by width.
        most_numbers: most numbers in registers of a lane, so that few of them spill.
        speeds: FLOP/s of each tile in full precision, of 2,048 tokens and the width that suits it.
    """

    name: str
    own: int
    sums: int
    scores: int
    products: int
    most_numbers: int
    speeds: Mapping[Tile, float]

    def fits(self, tile: Tile, target: Target, problem: Problem) -> bool:
        """Whether shared memory holds the tiles, and registers the numbers."""
        width = problem.lengths.width
        numbers = tile.rows * (self.sums * slice_of(width, self.own) + self.scores * tile.others) // WARP
        room_for_philox = tile.rows == 16 or "rng" not in problem.optional  # its registers are not in `numbers`
        return room_for_philox and numbers <= self.most_numbers and self.shared(tile, problem) <= target.shared

    def shared(self, tile: Tile, problem: Problem) -> MemoryLayout:
        """Tiles of the block's rows, and stages: two tiles of others, with room for two numbers of each row."""
        row = 2 * terms_of(problem) * (padded(problem.lengths.width) + 8)
        arrays = {"OWN": (row * tile.block, self.own), "RING": (2 * (row + 4) * tile.others, tile.stages)}
        return memory_layout("SHARED", arrays)


SMALL_TILES = {
    Tile(16, 4, 32, 2): 80e12,
    Tile(16, 4, 32, 1): 75e12,
    Tile(16, 2, 32, 1): 50e12,
    Tile(16, 2, 16, 1): 40e12,
}
FORWARD = Part("attention_mma", 1, 1, 1, 2, 160, {
    Tile(32, 8, 64, 2): 110e12, Tile(32, 8, 32, 2): 105e12, Tile(32, 4, 32, 2): 99e12, Tile(16, 8, 32, 2): 95e12,
    **SMALL_TILES,
})  # fmt: skip
OF_KEYS = Part("attention_mma_grad_keys", 2, 2, 2, 4, 192, {
    Tile(32, 4, 32, 2): 121e12, Tile(16, 8, 32, 2): 105e12, **SMALL_TILES,
})  # fmt: skip
OF_QUERIES = Part("attention_mma_grad_queries", 2, 1, 2, 3, 160, {
    Tile(32, 8, 32, 2): 117e12, Tile(32, 4, 32, 2): 115e12, Tile(16, 8, 32, 2): 101e12, **SMALL_TILES,
})  # fmt: skip


def padded(width: int) -> int:
    """The width of packed rows."""
    return -(-width // 16) * 16


def slice_of(width: int, own: int) -> int:
    """SLICE: the columns of the results that a block computes, all of them in the forward pass."""
    slices = -(-padded(width) // MAX_SLICE) if own > 1 else 1
    return padded(-(-width // slices))


def direct(problem: Problem) -> bool:
    """Whether the kernels round what they load, so that nothing is packed. Wider rows take too many registers."""
    return problem.precision == "bfloat16" and problem.lengths.width <= MAX_DIRECT


def terms_of(problem: Problem) -> int:
    """How many 16-bit numbers an operand is the sum of."""
    return 2 if problem.precision == FULL else 1


def candidates(target: Target, problem: Problem) -> Candidates | None:
    """Kernels of the tiles that are estimated fastest, then of the next ones. None where none fits, and for float64."""
    if target.capability < TENSOR_CORES or problem.dtype != np.float32:
        return None
    x = problem.lengths
    if problem.gradient:
        by_q, by_k, by_v = problem.results
        parts = ((OF_KEYS, x.keys, x.queries, (by_k, by_v)), (OF_QUERIES, x.queries, x.keys, (by_q,)))
        found = [_part(target, problem, *part) for part in parts]
    else:
        found = [_part(target, problem, FORWARD, x.queries, x.keys, problem.results)]
    if not all(found):
        return None
    pack, scratch = _pack(problem)
    packing = (pack,) if pack.blocks else ()
    moved = 4 * (12 if problem.gradient else 4) * (x.queries + x.keys) / 2 * x.width  # bytes of the arrays of a head
    seconds = sum(each[0][0] for each in found) + problem.estimated.batch * moved / BANDWIDTH
    packed = problem.estimated.batch * scratch / max(x.batch, 1)
    seconds += LAUNCH + 2 * packed / BANDWIDTH if packing else 0
    launches = zip(*([launch for _, launch in each] for each in found), strict=False)
    return Candidates(seconds, [CudaKernel((*packing, *each), scratch) for each in launches])


def _part(
    target: Target, problem: Problem, part: Part, length: int, others: int, results: tuple[int, ...]
) -> list[tuple[float, CudaLaunch]]:
    """The fastest launches of a kernel and their estimated seconds. A block computes some of ``length`` rows."""
    x, found = problem.lengths, []
    columns = slice_of(x.width, part.own)
    slices = -(-padded(x.width) // columns)
    for tile, speed in part.speeds.items():
        if not part.fits(tile, target, problem):
            continue
        blocks = -(-length // tile.block) * slices  # of a head
        launch = CudaLaunch(
            f"attention/mma_{'backward' if problem.gradient else 'forward'}.cu", part.name, problem.numbers,
            (problem.dtype,),
            blocks=x.batch * blocks,
            threads=tile.warps * WARP,
            shared=part.shared(tile, problem),
            definitions={
                **problem.definitions, **tile.definitions,
                "DIRECT": int(direct(problem)), **({"SLICE": columns} if problem.gradient else {}),
            },
            operands=(*problem.inputs, *((problem.kept[2],) if problem.gradient else ()), *problem.more, *results),
            layouts=(_scratch(problem),),
        )  # fmt: skip
        found.append((_seconds(target, problem, part, blocks, tile, speed, others), launch))
    return sorted(found, key=lambda each: each[0])[:MOST]


def _seconds(target: Target, problem: Problem, part: Part, blocks: int, tile: Tile, speed: float, others: int) -> float:
    """The estimated time of a kernel with `blocks` blocks for each head, in seconds.

    The blocks of a multiprocessor share its speed. Tiles that are only partly filled count in full.
    """
    resident = max(1, min(target.shared // part.shared(tile, problem), 8 // tile.warps))
    rows = tile.block * -(-others // tile.others) * tile.others * (0.5 if problem.causal else 1)
    flops = 2 * part.products * rows * padded(problem.lengths.width)
    of_one = speed / 132 * (1 if terms_of(problem) > 1 else ONE_TERM)
    return LAUNCH + START + waves(problem.estimated.batch * blocks, resident, target) * resident * flops / of_one


def _scratch(problem: Problem) -> MemoryLayout:
    """The layout of scratch: groups of packed rows and their scales; of the gradient also two numbers of each query."""
    x, gradient = problem.lengths, int(problem.gradient)
    q, k = groups = lengths(**{n: x.batch * -(-rows // GROUP) for n, rows in (("q", x.queries), ("k", x.keys))})
    packed = (k * 2 + q * (2 * gradient)) * int(not direct(problem))
    arrays = {
        "GROUPS": (GROUP * terms_of(problem) * padded(x.width) * 2, packed),
        "INVERSES": (4, packed * 4),
        "SHIFTS": (4, q * (GROUP * gradient)),
        "DELTAS": (4, q * (GROUP * gradient)),
    }
    return memory_layout("SCRATCH", arrays, *groups)


def _pack(problem: Problem) -> tuple[CudaLaunch, MemoryLayout]:
    """The launch before the others, and the layout of scratch. Its grid is empty if there is nothing to do."""
    x, gradient = problem.lengths, problem.gradient
    query_groups, key_groups = (x.batch * -(-length // GROUP) for length in (x.queries, x.keys))
    scratch, packed = _scratch(problem), 0 if direct(problem) else 2 * key_groups + 2 * query_groups * int(gradient)
    launch = CudaLaunch(
        "attention/mma_pack.cu", "attention_pack", problem.numbers, (problem.dtype,),
        blocks=packed or (query_groups if gradient else 0),
        threads=PACK_THREADS,
        definitions={**problem.definitions, "GRADIENT": int(gradient), "DIRECT": int(direct(problem))},
        layouts=(scratch,),
        operands=(*problem.inputs, *(problem.kept if gradient else ())),
    )  # fmt: skip
    return launch, scratch
