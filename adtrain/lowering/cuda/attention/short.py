"""Attention of sequences of at most 16 rows in one array, by mma.sync without packing: `attention/short.cu`."""

from __future__ import annotations

import numpy as np

from adtrain.core.kernel import CudaKernel, CudaLaunch
from adtrain.core.memory_layout import memory_layout
from adtrain.core.precision import FULL
from adtrain.core.target import TENSOR_CORES, WARP, Target
from adtrain.lowering.cuda.attention.problem import LAUNCH, Candidates, Problem

ROWS = 16
"""Rows of a block: those of a tensor-core instruction."""
MAX_WIDTH, WIDTH_STEP = 64, 16
"""The largest width of a head; a width is a multiple of WIDTH_STEP."""
MAX_HEADS, MAX_WARPS = 16, 8
"""Maximum heads; maximum warps of a block, among which the heads are divided."""
SCORES = 3 * ROWS**2 * np.dtype(np.float32).itemsize
"""Bytes of shared memory for the probabilities of a head and the cotangents of its scores, also transposed."""


def candidates(target: Target, problem: Problem) -> Candidates | None:
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
