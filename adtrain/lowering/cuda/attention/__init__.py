"""Attention and its gradient, by one of several implementations: the one with the shortest estimated time is first."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from adtrain.core.kernel import CudaKernel, Target, register
from adtrain.core.primitive import BFLOAT16
from adtrain.core.types import BITS, ArrayType
from adtrain.lowering.cuda.attention import mma, unpacked, wgmma
from adtrain.lowering.cuda.attention.problem import problem_of

IMPLEMENTATIONS = (
    unpacked.short_sequences,
    unpacked.few_queries,
    wgmma.candidates,
    mma.candidates,
    unpacked.by_fma,
)
"""Functions of a target and a problem: the kernels and the estimated seconds of the first of them, or None where the
implementation does not apply."""


def _candidates(arrays: int, gradient: bool, target: Target, *types: Any, **params: Any) -> list[CudaKernel]:
    problem = problem_of(arrays, gradient, types, params, target.by_member)
    found = [c for each in IMPLEMENTATIONS if (c := each(target, problem)) is not None]
    return [kernel for c in sorted(found, key=lambda c: c.seconds) for kernel in c.kernels]


def _stored_candidates(arrays: int, gradient: bool, target: Target, *types: Any, **params: Any) -> list[CudaKernel]:
    """The kernels for arrays that are bfloat16 in memory."""
    values = [ArrayType(x.shape, np.dtype(np.float32)) if x.dtype == BITS else x for x in types]
    problem = problem_of(arrays, gradient, values, params, target.by_member)._replace(stored=True)
    found = wgmma.candidates(target, problem) if problem.precision == "bfloat16" else None
    return [] if found is None else [*found.kernels]


for _arrays, _name in ((3, "attention"), (1, "self_attention")):
    for _gradient in (False, True):
        _primitive = _name + "_grad" * _gradient
        register(_primitive, "cuda", partial(_candidates, _arrays, _gradient))
        register(_primitive + BFLOAT16, "cuda", partial(_stored_candidates, _arrays, _gradient))
