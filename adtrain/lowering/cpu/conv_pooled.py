"""Gradients of a convolution behind max pooling: `conv_pooled.c`."""

from __future__ import annotations

from typing import Any

from adtrain.core.kernel import CKernel
from adtrain.core.registry import register
from adtrain.lowering.cpu.conv import CACHE_LINE, aligned_bytes, numbers

CACHED_BYTES = 24 << 10
"""Bytes of an image that are reread for each strip: most of an L1 cache."""
MIN_RUN_BYTES = 16
"""Bytes of a kernel row from which on its vectors are full enough."""


def pooled_numbers(
    x: Any, w: Any, y: Any, pooled: Any, window: Any, windows: Any, itemsize: int, precision: str
) -> tuple[int, ...]:
    """From the shapes of image, weight, output and pooled output."""
    strip = _strip(x, pooled, window, windows, itemsize)
    return (*numbers(x, w, y, window, precision), *pooled[2:], *windows.kernel, *windows.stride, strip)


def _strip(x: Any, pooled: Any, window: Any, windows: Any, itemsize: int) -> int:
    """Rows of windows over the rows of the image that CACHED_BYTES hold."""
    row = (x[3] + 2 * window.padding[1]) * x[1] * itemsize
    return max(1, min(pooled[2], CACHED_BYTES // (row * windows.stride[0])))


def _pooled_image(x: Any, window: Any, itemsize: int) -> int:
    return (x[2] + 2 * window.padding[0]) * (x[3] + 2 * window.padding[1]) * x[1] * itemsize


def pooled_input_grad_scratch(
    g: Any, where: Any, w: Any, window: Any, windows: Any, shape: Any, size: tuple[int, int], precision: str
) -> int:
    (o, c, *_), (_, _, ph, pw), itemsize = w.shape, g.shape, g.dtype.itemsize
    x, area = (1, c, *size), windows.kernel[0] * windows.kernel[1]
    live = _strip(x, g.shape, window, windows, itemsize) * pw * area * o + 1
    return aligned_bytes(4 * ph * pw * area, live * 2 * itemsize, _pooled_image(x, window, itemsize))


def pooled_input_grad_prepared(g: Any, where: Any, w: Any, **_: Any) -> int:
    """Runs of weights, each up to a vector longer."""
    o, c, kh, kw = w.shape
    return aligned_bytes(o * kh * (kw * c * w.dtype.itemsize + CACHE_LINE))


def pooled_weight_grad_scratch(
    x: Any, g: Any, where: Any, window: Any, windows: Any, shape: Any, size: tuple[int, int], precision: str
) -> int:
    (_, o, _, pw), (kh, kw), c, itemsize = g.shape, size, x.shape[1], g.dtype.itemsize
    live = _strip(x.shape, g.shape, window, windows, itemsize) * pw * o + 1
    sums, one = o * kh * (kw * c * itemsize + CACHE_LINE), kh * kw * c * itemsize + CACHE_LINE
    image = _pooled_image(x.shape, window, itemsize)
    return aligned_bytes(4 * windows.kernel[0] * windows.kernel[1], 4 * o, live * 2 * itemsize, sums, one, image)


def _handled(window: Any, windows: Any, g: Any, shape: tuple[int, ...], run: int) -> bool:
    """Whether the C functions support this convolution and pooling, and are faster than the dense ones.

    A product takes them about twice as long, and short kernel rows (``run`` elements) do not fill vectors.
    """
    if window.stride != (1, 1) or window.dilation != (1, 1) or window.groups != 1 or windows.padding != (0, 0):
        return False
    return run * g.dtype.itemsize >= MIN_RUN_BYTES and shape[2] * shape[3] >= 2 * g.shape[2] * g.shape[3]


register(
    "conv2d_input_grad_pooled",
    "cpu",
    CKernel(
        "conv_pooled.c",
        "conv2d_input_grad_pooled",
        lambda g, where, w, window, windows, shape, size, precision: pooled_numbers(
            (1, w.shape[1], *size), w.shape, shape, g.shape, window, windows, g.dtype.itemsize, precision
        ),
        items=lambda g, where, w, window, windows, shape, size, precision: _handled(
            window, windows, g, shape, w.shape[1] * w.shape[3]
        ),
        scratch=pooled_input_grad_scratch,
        prepared=pooled_input_grad_prepared,
    ),
)
register(
    "conv2d_weight_grad_pooled",
    "cpu",
    CKernel(
        "conv_pooled.c",
        "conv2d_weight_grad_pooled",
        lambda x, g, where, window, windows, shape, size, precision: pooled_numbers(
            x.shape, (shape[1], x.shape[1], *size), shape, g.shape, window, windows, g.dtype.itemsize, precision
        ),
        items=lambda x, g, where, window, windows, shape, size, precision: _handled(
            window, windows, g, shape, x.shape[1] * size[1]
        ),
        sums=True,
        scratch=pooled_weight_grad_scratch,
    ),
)
