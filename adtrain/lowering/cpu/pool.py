"""Pooling: `pool.c`, an image of one example at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from adtrain.core.kernel import CKernel
from adtrain.core.registry import register


def _kernel(name: str, numbers: Callable[..., tuple[int, ...]]) -> CKernel:
    return CKernel("pool.c", name, numbers, items=True)


def _numbers(x_shape: Sequence[int], y_shape: Sequence[int], windows: Any) -> tuple[int, ...]:
    """POOL_NUMBERS of `kernels/cpu/pool.c`."""
    return (*x_shape[1:], *y_shape[2:], *windows.kernel, *windows.stride, *windows.padding)


def _pooled_numbers(x: Any, windows: Any) -> tuple[int, ...]:
    return _numbers(x.shape, windows.output_shape("pooling", x.shape), windows)


register("max_pool2d", "cpu", _kernel("max_pool2d", _pooled_numbers))
register(
    "max_pool2d_put",
    "cpu",
    _kernel("max_pool2d_put", lambda ct, where, windows, shape: _numbers(shape, ct.shape, windows)),
)
register(
    "max_pool2d_pick",
    "cpu",
    _kernel("max_pool2d_pick", lambda x, where, windows: _numbers(x.shape, where.shape, windows)),
)
register("avg_pool2d", "cpu", _kernel("avg_pool2d", _pooled_numbers))
register(
    "avg_pool2d_put", "cpu", _kernel("avg_pool2d_put", lambda ct, windows, shape: _numbers(shape, ct.shape, windows))
)
