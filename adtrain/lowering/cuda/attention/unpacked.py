"""Attention without packing: of a few queries, as a language model needs it for its next token
(`attention/few_queries.cu`); of sequences of at most 16 rows in one array, by mma.sync (`attention/short.cu`); and by
FMA, for every dtype and shape (`attention/fma.cu`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from adtrain.core.kernel import TENSOR_CORES, WARP, CudaKernel, CudaLaunch, MemoryLayout, Target, memory_layout
from adtrain.core.precision import FULL
from adtrain.lowering.cuda.attention.problem import LAUNCH, Candidates, Problem, waves

MAX_QUERIES = 8
"""Most queries of a head. A thread holds columns of all of them in registers."""
MAX_NUMBERS = 64
"""Most numbers of queries and of sums, each, in the registers of a thread."""
THREADS = 512, 256, 128, 64
"""Threads of a block, the largest number that shared memory admits."""
VECTOR_BYTES = 16
"""Bytes that a thread loads at once."""
BANDWIDTH = 60e9
"""Bytes per second that a multiprocessor reads."""


def few_queries(target: Target, problem: Problem) -> Candidates | None:
    """One kernel. None for a gradient, for more queries, with causal order or dropout."""
    x, itemsize = problem.lengths, problem.dtype.itemsize
    others = problem.causal or problem.gradient or problem.arrays == 1 or set(problem.optional) - {"mask"}
    if others or not 1 <= x.queries <= MAX_QUERIES:
        return None
    vector = VECTOR_BYTES // itemsize
    lanes = min(WARP, 1 << (-(-x.width // vector) - 1).bit_length())
    columns = -(-x.width // (lanes * vector)) * vector  # of a thread
    if x.queries * columns > MAX_NUMBERS:
        return None
    for threads in THREADS:
        teams = threads // lanes
        shared = memory_layout(
            "SHARED",
            {
                "SUMS": (itemsize * x.queries * columns * lanes, teams),
                "TOPS": (itemsize, teams * x.queries),
                "TOTALS": (itemsize, teams * x.queries),
            },
        )
        if shared <= target.shared:
            break
    else:
        return None
    launch = CudaLaunch(
        "attention/few_queries.cu",
        "attention_few_queries",
        problem.numbers,
        (problem.dtype,),
        blocks=x.batch,
        threads=threads,
        shared=shared,
        definitions={**problem.definitions, "QUERIES": x.queries, "LANES": lanes, "TEAMS": teams},
    )
    read = 2 * x.keys * x.width * itemsize
    seconds = LAUNCH + waves(problem.estimated.batch, 2, target) * read / BANDWIDTH
    return Candidates(seconds, [CudaKernel((launch,))])


ROWS = 16
"""Rows of a block: those of a tensor-core instruction."""
MAX_WIDTH, WIDTH_STEP = 64, 16
"""The largest width of a head; a width is a multiple of WIDTH_STEP."""
MAX_HEADS, MAX_WARPS = 16, 8
"""Maximum heads; maximum warps of a block, among which the heads are divided."""
SCORES = 3 * ROWS**2 * np.dtype(np.float32).itemsize
"""Bytes of shared memory for the probabilities of a head and the cotangents of its scores, also transposed."""


def short_sequences(target: Target, problem: Problem) -> Candidates | None:
    """One kernel. Its estimate is one launch, the shortest of all implementations: it reads each array once."""
    x = problem.lengths
    plain = problem.arrays == 1 and not problem.optional and problem.precision == FULL
    if target.capability < TENSOR_CORES or problem.dtype != np.float32 or not plain:
        return None
    rows = x.batch // x.heads * x.queries
    # A Program by member: whole blocks of one sequence, whatever the number of sequences.
    whole = rows > 0 and ROWS % x.queries == 0 and (x.queries if problem.by_member else rows) % ROWS == 0
    if not whole or x.heads > MAX_HEADS or x.width > MAX_WIDTH or x.width % WIDTH_STEP:
        return None
    threads = min(x.heads, MAX_WARPS) * WARP
    launch = CudaLaunch(
        "attention/short.cu",
        "short_attention_grad" if problem.gradient else "short_attention",
        problem.options[:1],
        (problem.dtype,),
        blocks=rows // ROWS,
        threads=threads,
        shared=memory_layout("SHARED", {"SCORES": (x.heads * SCORES, 1)}),
        definitions={
            "SEQUENCE_ROWS": x.queries,
            "HEAD_COUNT": x.heads,
            "HEAD_WIDTH": x.width,
            "CAUSAL_ORDER": int(problem.causal),
            "BLOCK_THREADS": threads,
        },
    )
    return Candidates(LAUNCH, [CudaKernel((launch,))])


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


def by_fma(target: Target, problem: Problem) -> Candidates:
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
    problem: Problem, tile: Tile, name: str, length: int, shared: MemoryLayout, operands: tuple[int, ...]
) -> CudaLaunch:
    """A launch of a block for each tile of `length` rows of each head."""
    return CudaLaunch(
        "attention/fma.cu",
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
    launch = _launch(problem, tile, "attention", problem.lengths.queries, shared, operands)
    return CudaKernel((launch,))


def _backward(problem: Problem, tile: Tile, shared: MemoryLayout) -> CudaKernel:
    """Three launches: the sums of cotangent times output, then the cotangents of keys and values, then of queries."""
    x = problem.lengths
    out, logsumexp, ct = problem.kept
    given = (*problem.inputs, logsumexp, ct, *problem.more)
    by_q, by_k, by_v = problem.results
    by_keys = _launch(problem, tile, "attention_grad_keys", x.keys, shared, (*given, by_k, by_v))
    by_queries = _launch(problem, tile, "attention_grad_queries", x.queries, shared, (*given, by_q))
    rows = x.batch * x.queries
    delta = CudaLaunch(
        by_keys.file, "attention_delta", (x.batch, x.heads, x.queries, x.out_row), by_keys.dtypes, rows * WARP,
        definitions=by_keys.definitions, layouts=(shared, *by_keys.layouts), operands=(out, ct),
    )  # fmt: skip
    return CudaKernel((delta, by_keys, by_queries), _scratch(problem))
