"""The registry of kernels: which kernels compute a primitive on which backend.

adtrain's own kernels are registered by the modules of `adtrain.lowering`. A user's kernel is registered the same way:

    register("mish", "cuda", lambda target, x: [CudaKernel((CudaLaunch("/home/me/mish.cu", "mish", ...),))])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from adtrain.core.kernel import CKernel, CudaKernel
from adtrain.core.target import Target

CudaRule: TypeAlias = Callable[..., Sequence[CudaKernel]]
"""``rule(target, *types, **params)`` to candidates, the one to prefer first; empty where there is no kernel."""

_C_KERNELS: dict[str, tuple[CKernel, ...]] = {}
_CUDA_RULES: dict[str, CudaRule] = {}


def register(primitive: str, backend: str, kernels: CKernel | tuple[CKernel, ...] | CudaRule) -> None:
    """Say which kernels compute ``primitive`` on ``backend``.

    Args:
        primitive: its name. Two names joined by "+" stand for a fused pair: "conv2d+max_pool2d".
        backend: "cpu", with C functions (the forms of one function, or alternatives), or "cuda", with a rule.

    Raises:
        ValueError: it has kernels there already, or there is no such backend.
    """
    table: dict[str, Any] = {"cpu": _C_KERNELS, "cuda": _CUDA_RULES}.get(backend, {})
    if backend not in ("cpu", "cuda"):
        raise ValueError(f"register: found backend {backend!r}, expected 'cpu' or 'cuda'")
    if primitive in table:
        raise ValueError(f"register: {primitive} has kernels for {backend} already")
    table[primitive] = (kernels,) if isinstance(kernels, CKernel) else kernels


def c_kernels(primitive: str) -> tuple[CKernel, ...]:
    """The C functions that compute ``primitive``; none where NumPy does."""
    return _C_KERNELS.get(primitive, ())


def cuda_kernels(primitive: str, target: Target, *types: Any, **params: Any) -> Sequence[CudaKernel]:
    """The candidates for ``primitive`` on arguments of these types, the one to prefer first."""
    rule = _CUDA_RULES.get(primitive)
    return rule(target, *types, **params) if rule is not None else ()
