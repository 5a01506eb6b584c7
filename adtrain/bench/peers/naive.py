"""Naive C loops that replace the matrix products and convolutions of the plain NumPy step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adtrain.backends.cpu import naive

Sizes = tuple[int, int]


def product(a: Any, b: Any) -> Any:
    """a @ b in float32. A transposed view is passed as its base with a flag, without a copy."""
    transposed = [x.flags.f_contiguous and not x.flags.c_contiguous for x in (a, b)]
    return naive.matmul(*(x.T if flag else x for x, flag in zip((a, b), transposed, strict=True)), *transposed)


def convolved(x: Any, weight: Any, stride: Sizes, padding: Sizes) -> tuple[Any, Callable[[Any], tuple[Any, Any]]]:
    """As `numpy_network.convolved`, without a column matrix."""
    sizes = naive.conv_sizes(x.shape, weight.shape, stride, padding)
    n, out, high, wide = sizes[0], sizes[4], *sizes[7:9]

    def pull(ct: Any) -> tuple[Any, Any]:
        by_x = naive.call("conv2d_input_grad", x.shape, ct, weight, *sizes)
        return by_x, naive.call("conv2d_weight_grad", weight.shape, x, ct, *sizes)

    return naive.call("conv2d", (n, out, high, wide), x, weight, *sizes), pull
