"""Attention of a few queries, as a language model needs it for its next token: `attention/few_queries.cu`."""

from __future__ import annotations

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.memory_layout import memory_layout
from adtrain.core.target import WARP, Target
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


def candidates(target: Target, problem: Problem) -> Candidates | None:
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
