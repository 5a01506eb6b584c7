"""The C functions for convolutions: which of `kernels/cpu` each primitive calls, on one image at a time."""

from __future__ import annotations

from typing import Any

from adtrain.core.kernel import CKernel
from adtrain.core.registry import register
from adtrain.lowering.cpu.shapes import in_full

CACHE_LINE = 64
"""Bytes to which each part of a function's scratch is rounded up; vectors may read that far past its end."""

CORRELATION = 160
"""Bytes of a struct of `kernels/cpu/correlate.h`."""


def numbers(x: Any, w: Any, y: Any, window: Any, precision: str) -> tuple[int, ...]:
    """CONV_NUMBERS of `kernels/cpu/conv.h` from the shapes of image, weight and output."""
    in_full("conv2d", precision)
    (_, c, h, width), (o, _, kh, kw) = x, w
    return (c, h, width, o, y[2], y[3], kh, kw, *window.stride, *window.padding, *window.dilation, window.groups)


def aligned_bytes(*parts: int) -> int:
    return sum(-(-part // CACHE_LINE) * CACHE_LINE for part in parts) + CACHE_LINE


def _output(x: Any, w: Any, window: Any) -> tuple[int, int, int, int]:
    rows, columns = (window.output_length(i, x.shape[i + 2], w.shape[i + 2]) for i in (0, 1))
    return (1, w.shape[0], rows, columns)


def _forward_numbers(x: Any, w: Any, window: Any, precision: str) -> tuple[int, ...]:
    return numbers(x.shape, w.shape, _output(x, w, window), window, precision)


def _forward_scratch(x: Any, w: Any, window: Any, precision: str) -> int:
    rows, columns = (
        n + (k - 1) * d // s
        for n, k, d, s in zip(_output(x, w, window)[2:], w.shape[2:], window.dilation, window.stride, strict=True)
    )
    return aligned_bytes(x.shape[1] * window.stride[0] * window.stride[1] * rows * columns * x.dtype.itemsize)


def _forward_prepared(x: Any, w: Any, window: Any, precision: str) -> int:
    (_, _, oh, ow), (_, c, kh, kw) = _output(x, w, window), w.shape
    return aligned_bytes(CORRELATION, 8 * c * kh * kw, 4 * kh, 20 * (oh * ow + 4), _size(w))


def _input_grad_scratch(g: Any, w: Any, window: Any, size: tuple[int, int], precision: str) -> int:
    rows, columns = (
        -(-(n + p) // s) + (k - 1) * d // s - p // s
        for n, k, p, d, s in zip(size, w.shape[2:], window.padding, window.dilation, window.stride, strict=True)
    )
    return aligned_bytes(w.shape[0] * rows * columns * g.dtype.itemsize)


def _input_grad_prepared(g: Any, w: Any, window: Any, size: tuple[int, int], precision: str) -> int:
    (o, _, kh, kw), (sh, sw) = w.shape, window.stride
    taps, spans = o // window.groups * kh * kw, size[0] * size[1] + 4 * sh * sw
    return aligned_bytes(CORRELATION * sh * sw, 8 * taps, 4 * kh * sw, 20 * spans, _size(w))


def _size(w: Any) -> int:
    size: int = w.shape[0] * w.shape[1] * w.shape[2] * w.shape[3] * w.dtype.itemsize
    return size


def _weight_grad_scratch(x: Any, g: Any, window: Any, size: tuple[int, int], precision: str) -> int:
    (_, c, h, w), (ph, pw), (_, _, oh, ow) = x.shape, window.padding, g.shape
    taps = c // window.groups * size[0] * size[1]
    padded = c * (h + 2 * ph) * (w + 2 * pw) * x.dtype.itemsize
    return aligned_bytes(4 * taps, 2 * CACHE_LINE * oh * ow, padded)


def _input_grad_numbers(g: Any, w: Any, window: Any, size: tuple[int, int], precision: str) -> tuple[int, ...]:
    return numbers((1, w.shape[1] * window.groups, *size), w.shape, g.shape, window, precision)


def _weight_grad_numbers(x: Any, g: Any, window: Any, size: tuple[int, int], precision: str) -> tuple[int, ...]:
    return numbers(x.shape, (g.shape[1], x.shape[1], *size), g.shape, window, precision)


FORWARD = CKernel(
    "conv.c",
    "conv2d",
    _forward_numbers,
    items=(True, False),
    scratch=_forward_scratch,
    prepared=_forward_prepared,
)
INPUT_GRAD = CKernel(
    "conv.c",
    "conv2d_input_grad",
    _input_grad_numbers,
    items=(True, False),
    scratch=_input_grad_scratch,
    prepared=_input_grad_prepared,
)
WEIGHT_GRAD = CKernel(
    "conv_weight_grad.c",
    "conv2d_weight_grad",
    _weight_grad_numbers,
    items=(True, True),
    sums=True,
    scratch=_weight_grad_scratch,
)

MIN_CHANNELS, MIN_CHANNEL_ROWS = 16, 224
"""Input and output channels, and channels times rows or columns, from which on Winograd's method is faster than the
direct one."""
MIN_LENGTH_FOR_4X4 = 12
"""Rows and columns from which on tiles of 4x4 are faster than tiles of 2x2."""


def _winograd(w: Any, window: Any, size: tuple[int, int]) -> tuple[bool, ...] | None:
    plain = window.stride == window.dilation == (1, 1) and window.groups == 1 and w.shape[2:] == (3, 3)
    channels = min(w.shape[:2])
    return (True, False) if plain and channels >= MIN_CHANNELS and channels * min(size) >= MIN_CHANNEL_ROWS else None


def _tile(size: tuple[int, int]) -> int:
    """Rows and columns of a tile of an output of this size."""
    return 4 if min(size) >= MIN_LENGTH_FOR_4X4 else 2


def _winograd_scratch(channels: int, size: tuple[int, int], itemsize: int) -> int:
    """``size`` of the output."""
    tile = _tile(size)
    positions, (rows, columns) = (tile + 2) ** 2, (-(-n // tile) for n in size)
    patches, products = positions * (2 * channels + 1) * CACHE_LINE, positions * 32 * CACHE_LINE
    row = tile * ((columns + 1) * itemsize + CACHE_LINE)
    return aligned_bytes(patches, products, row, channels * (tile * rows + 2) * row)


def _winograd_weights(w: Any, size: tuple[int, int]) -> int:
    positions: int = (_tile(size) + 2) ** 2
    return positions * w.shape[0] * w.shape[1] * w.dtype.itemsize


FORWARD_WINOGRAD = CKernel(
    "conv_winograd.c",
    "conv2d_winograd",
    lambda x, w, window, precision: (*_forward_numbers(x, w, window, precision), _tile(_output(x, w, window)[2:])),
    items=lambda x, w, window, precision: _winograd(w, window, _output(x, w, window)[2:]),
    scratch=lambda x, w, window, precision: _winograd_scratch(w.shape[1], _output(x, w, window)[2:], x.dtype.itemsize),
    prepared=lambda x, w, window, precision: _winograd_weights(w, _output(x, w, window)[2:]),
)
INPUT_GRAD_WINOGRAD = CKernel(
    "conv_winograd.c",
    "conv2d_input_grad_winograd",
    lambda g, w, window, size, precision: (*_input_grad_numbers(g, w, window, size, precision), _tile(size)),
    items=lambda g, w, window, size, precision: _winograd(w, window, size) if max(window.padding) <= 2 else None,
    scratch=lambda g, w, window, size, precision: _winograd_scratch(w.shape[0], size, g.dtype.itemsize),
    prepared=lambda g, w, window, size, precision: _winograd_weights(w, size),
)


register("conv2d", "cpu", (FORWARD_WINOGRAD, FORWARD))
register("conv2d_input_grad", "cpu", (INPUT_GRAD_WINOGRAD, INPUT_GRAD))
register("conv2d_weight_grad", "cpu", WEIGHT_GRAD)
