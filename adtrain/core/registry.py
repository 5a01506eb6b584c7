"""The registry of kernels: which kernels compute a primitive on which backend.

The modules of `adtrain.lowering` register adtrain's kernels. Users register their own in the same way, with the names
that `adtrain.extend` exports.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

from adtrain.core.kernel import CKernel, CudaKernel
from adtrain.core.static_key import params_key
from adtrain.core.target import Target

CudaRule: TypeAlias = Callable[..., Sequence[CudaKernel]]
"""``rule(target, *types, **params)`` returns candidates for a GPU, argument types and parameters, the preferred one
first. It returns none where no kernel fits."""

_C_KERNELS: dict[str, tuple[CKernel, ...]] = {}
_CUDA_RULES: dict[str, CudaRule] = {}
_CANDIDATES: dict[Hashable, tuple[CudaKernel, ...]] = {}
"""What rules have returned, by rule and arguments: passes ask for the same kernels many times, as for equal layers."""
MAX_CANDIDATES = 4096
"""Entries of `_CANDIDATES` at which it is emptied."""


def register(primitive: str, backend: str, kernels: CKernel | tuple[CKernel, ...] | CudaRule) -> None:
    """Register the kernels that compute ``primitive`` on ``backend``.

    Args:
        primitive: its name, or the form of fused equations.
        backend: "cpu" or "cuda".
        kernels: for "cpu" a C kernel, or several: one that works on items and one for all threads, say. For "cuda" a
            rule that returns candidates.

    Raises:
        ValueError: there is no such backend, or the primitive has kernels there already.
    """
    tables: dict[str, dict[str, Any]] = {"cpu": _C_KERNELS, "cuda": _CUDA_RULES}
    if backend not in tables:
        raise ValueError(f"register: found backend {backend!r}, expected 'cpu' or 'cuda'")
    if primitive in tables[backend]:
        raise ValueError(f"register: {primitive!r} already has kernels for {backend!r}")
    tables[backend][primitive] = (kernels,) if isinstance(kernels, CKernel) else kernels


def has_kernels(primitive: str, backend: str) -> bool:
    """Whether kernels of ``primitive`` are registered for "cpu" or "cuda"."""
    return primitive in (_C_KERNELS if backend == "cpu" else _CUDA_RULES)


def forget(primitive: str) -> None:
    """Remove the kernels of ``primitive`` on all backends."""
    _C_KERNELS.pop(primitive, None)
    _CUDA_RULES.pop(primitive, None)


def c_kernels(primitive: str) -> tuple[CKernel, ...]:
    """The C kernels of ``primitive``. Empty: it runs by its NumPy reference."""
    return _C_KERNELS.get(primitive, ())


def cuda_kernels(primitive: str, target: Target, *types: Any, **params: Any) -> Sequence[CudaKernel]:
    """The candidates for ``primitive`` with these argument types and parameters, the preferred one first.

    Those whose grids are too large for a launch are left out.
    """
    rule = _CUDA_RULES.get(primitive)
    if rule is None:
        return ()
    key = rule, target, types, params_key(params)
    found = _CANDIDATES.get(key)
    if found is None:
        if len(_CANDIDATES) >= MAX_CANDIDATES:
            _CANDIDATES.clear()
        found = _CANDIDATES[key] = tuple(each for each in rule(target, *types, **params) if each.launchable)
    return found
