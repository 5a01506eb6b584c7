"""Attention and its gradient, by one of several implementations: the one with the shortest estimated time is first."""

from __future__ import annotations

from typing import Any

import numpy as np

from adtrain.core.kernel import CudaKernel, Target, register
from adtrain.core.types import BITS, ArrayType
from adtrain.lowering.cuda.attention import few, fma, mma, short, wgmma
from adtrain.lowering.cuda.attention.problem import problem_of

IMPLEMENTATIONS = (short, few, wgmma, mma, fma)
"""Modules with a function ``candidates(target, problem)``: its kernels and the estimated seconds of the first of
them, or None where it does not apply."""


def _candidates(arrays: int, gradient: bool, target: Target, types: tuple[Any, ...], params: Any) -> list[CudaKernel]:
    problem = problem_of(arrays, gradient, types, params, target.by_member)
    found = [c for each in IMPLEMENTATIONS if (c := each.candidates(target, problem)) is not None]
    return [kernel for c in sorted(found, key=lambda c: c.seconds) for kernel in c.kernels]


def _register(name: str, arrays: int, gradient: bool) -> None:
    register(name, "cuda", lambda target, *types, **params: _candidates(arrays, gradient, target, types, params))


def _stored_candidates(
    arrays: int, gradient: bool, target: Target, types: tuple[Any, ...], params: Any
) -> list[CudaKernel]:
    """The kernels for arrays that are bfloat16 in memory."""
    values = [ArrayType(x.shape, np.dtype(np.float32)) if x.dtype == BITS else x for x in types]
    problem = problem_of(arrays, gradient, values, params, target.by_member)._replace(stored=True)
    found = wgmma.candidates(target, problem) if problem.precision == "bfloat16" else None
    return [] if found is None else [*found.kernels]


def _register_stored(name: str, arrays: int, gradient: bool) -> None:
    def rule(target: Target, *types: Any, **params: Any) -> list[CudaKernel]:
        return _stored_candidates(arrays, gradient, target, types, params)

    register(f"{name}_bfloat16", "cuda", rule)


for _arrays, _name in ((3, "attention"), (1, "self_attention")):
    _register_stored(_name, _arrays, False)
    _register_stored(f"{_name}_grad", _arrays, True)
_register("attention", 3, False)
_register("attention_grad", 3, True)
_register("self_attention", 1, False)
_register("self_attention_grad", 1, True)
