"""Attention without packing for small problems: of a few queries, as a language model needs it for its next token
(`attention/few_queries.cu`), and of sequences of at most 16 rows in one array, by mma.sync (`attention/short.cu`)."""

from __future__ import annotations

import numpy as np

from adtrain.core.kernel import TENSOR_CORES, WARP, CudaKernel, CudaLaunch, Target, memory_layout
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
