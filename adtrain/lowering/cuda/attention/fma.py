"""Attention by FMA, for every dtype and shape: `attention/fma_forward.cu` and `attention/fma_backward.cu`."""

from __future__ import annotations

from typing import NamedTuple

from adtrain.core.kernel import WARP, CudaKernel, CudaLaunch, MemoryLayout, Target, memory_layout
from adtrain.lowering.cuda.attention.problem import LAUNCH, Candidates, Problem, waves

SHARED_VECTOR = 16
"""Bytes of padding of a row in shared memory."""


class Tile(NamedTuple):
    """Rows of a tile of queries or keys (TILE), and rows of a thread (MICRO)."""

    rows: int
    micro: int

    @property
    def lanes(self) -> int:
        return self.rows // self.micro

    def shared(self, width: int, itemsize: int, tiles: int, scores: int) -> MemoryLayout:
        """The layout of shared memory with `tiles` tiles of rows and `scores` tiles of scores."""
        padded, vector = -(-width // self.lanes) * self.lanes, SHARED_VECTOR // itemsize
        tile, of_scores = (self.rows * itemsize * (columns + vector) for columns in (padded, self.rows))
        return memory_layout("SHARED", {"TILES": (tile, tiles), "SCORES": (of_scores, scores)})


MIN_TILE = 16
"""Rows of the first candidate for the shortest sequences."""
TILES = (Tile(64, 4), Tile(32, 2), Tile(16, 1), Tile(8, 1))
SPEED = 25e12 / 132
"""FLOP/s of a multiprocessor of an H200."""


def candidates(target: Target, problem: Problem) -> Candidates:
    """A kernel for each tile that fits into shared memory, first for the largest one that the sequences fill."""
    longest = max(problem.lengths.queries, problem.lengths.keys)
    tiles, scores = (4, 2) if problem.gradient else (2, 1)
    sizes = {tile: tile.shared(problem.lengths.width, problem.dtype.itemsize, tiles, scores) for tile in TILES}
    fitting = [tile for tile in TILES if sizes[tile] <= target.shared]
    ordered = sorted(fitting, key=lambda tile: (tile.rows >= 2 * longest and tile.rows > MIN_TILE, -tile.rows))
    make = _backward if problem.gradient else _forward
    return Candidates(_seconds(target, problem, ordered[0]), [make(problem, tile, sizes[tile]) for tile in ordered])


def _seconds(target: Target, problem: Problem, tile: Tile) -> float:
    """The estimated time of the products, with all tiles counted in full, and of the launches."""
    x, (products, launches) = problem.estimated, (7, 3) if problem.gradient else (2, 1)
    tiles_of_queries, tiles_of_keys = (-(-length // tile.rows) for length in (x.queries, x.keys))
    pairs = tile.rows**2 * tiles_of_keys * (0.5 if problem.causal else 1)
    rounds = waves(x.batch * tiles_of_queries, 1, target)
    return launches * LAUNCH + rounds * 2 * products * pairs * x.width / SPEED


def _scratch(problem: Problem) -> MemoryLayout:
    """The layout of scratch of the gradient."""
    x = problem.lengths
    return memory_layout("SCRATCH", {"DELTAS": (problem.dtype.itemsize, x.batch * x.queries)})


def _launch(
    problem: Problem, tile: Tile, file: str, name: str, length: int, shared: MemoryLayout, operands: tuple[int, ...]
) -> CudaLaunch:
    """A launch of a block for each tile of `length` rows of each head."""
    return CudaLaunch(
        f"attention/{file}",
        name,
        problem.numbers,
        (problem.dtype,),
        blocks=problem.lengths.batch * -(-length // tile.rows),
        threads=tile.lanes**2,
        shared=shared,
        layouts=(_scratch(problem),),
        definitions={**problem.definitions, "TILE": tile.rows, "MICRO": tile.micro},
        operands=operands,
    )


def _forward(problem: Problem, tile: Tile, shared: MemoryLayout) -> CudaKernel:
    operands = (*problem.inputs, *problem.more, *problem.results)
    launch = _launch(problem, tile, "fma_forward.cu", "attention", problem.lengths.queries, shared, operands)
    return CudaKernel((launch,))


def _backward(problem: Problem, tile: Tile, shared: MemoryLayout) -> CudaKernel:
    """Three launches: the sums of cotangent times output, then the cotangents of keys and values, then of queries."""
    x, file = problem.lengths, "fma_backward.cu"
    out, logsumexp, ct = problem.kept
    given = (*problem.inputs, logsumexp, ct, *problem.more)
    by_q, by_k, by_v = problem.results
    by_keys = _launch(problem, tile, file, "attention_grad_keys", x.keys, shared, (*given, by_k, by_v))
    by_queries = _launch(problem, tile, file, "attention_grad_queries", x.queries, shared, (*given, by_q))
    rows = x.batch * x.queries
    delta = CudaLaunch(
        by_keys.file, "attention_delta", (x.batch, x.heads, x.queries, x.out_row), by_keys.dtypes, rows * WARP,
        definitions=by_keys.definitions, layouts=(shared, *by_keys.layouts), operands=(out, ct),
    )  # fmt: skip
    return CudaKernel((delta, by_keys, by_queries), _scratch(problem))
