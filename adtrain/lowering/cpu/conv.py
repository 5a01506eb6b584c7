"""The C functions for convolutions and pooling: which of `kernels/cpu` each primitive calls, on one image at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from adtrain.core.kernel import CKernel, register
from adtrain.lowering.cpu.moves import in_full

CACHE_LINE = 64
"""Bytes to which each part of a function's scratch is rounded up; vectors may read that far past its end."""

STRUCTS = {"CORRELATION_BYTES": 168, "TAP_BYTES": 8, "SPAN_BYTES": 20, "MAX_VECTORS": 4}
"""Macros of `conv.c`: bytes of structs of `kernels/cpu/correlate.h`; maximum spans of a tile."""
CORRELATION, TAP_BYTES, SPAN_BYTES, MAX_VECTORS = STRUCTS.values()


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
    return aligned_bytes(CORRELATION, TAP_BYTES * c * kh * kw, 4 * kh, SPAN_BYTES * (oh * ow + MAX_VECTORS), _size(w))


def _input_grad_scratch(g: Any, w: Any, window: Any, size: tuple[int, int], precision: str) -> int:
    rows, columns = (
        -(-(n + p) // s) + (k - 1) * d // s - p // s
        for n, k, p, d, s in zip(size, w.shape[2:], window.padding, window.dilation, window.stride, strict=True)
    )
    return aligned_bytes(w.shape[0] * rows * columns * g.dtype.itemsize)


def _input_grad_prepared(g: Any, w: Any, window: Any, size: tuple[int, int], precision: str) -> int:
    (o, _, kh, kw), (sh, sw) = w.shape, window.stride
    taps, spans = o // window.groups * kh * kw, size[0] * size[1] + MAX_VECTORS * sh * sw
    return aligned_bytes(CORRELATION * sh * sw, TAP_BYTES * taps, 4 * kh * sw, SPAN_BYTES * spans, _size(w))


def _size(w: Any) -> int:
    size: int = w.shape[0] * w.shape[1] * w.shape[2] * w.shape[3] * w.dtype.itemsize
    return size


def _weight_grad_scratch(x: Any, g: Any, window: Any, size: tuple[int, int], precision: str) -> int:
    (_, c, h, w), (ph, pw), (_, _, oh, ow) = x.shape, window.padding, g.shape
    taps = c // window.groups * size[0] * size[1]
    padded = c * (h + 2 * ph) * (w + 2 * pw) * x.dtype.itemsize
    rows, columns = (
        (n + (k - 1) * d // s) * s for n, k, d, s in zip((oh, ow), size, window.dilation, window.stride, strict=True)
    )
    planes = c * rows * columns * x.dtype.itemsize
    return aligned_bytes(4 * taps, 2 * CACHE_LINE * oh * ow, max(padded, planes))


def _input_grad_numbers(g: Any, w: Any, window: Any, size: tuple[int, int], precision: str) -> tuple[int, ...]:
    return numbers((1, w.shape[1] * window.groups, *size), w.shape, g.shape, window, precision)


def _weight_grad_numbers(x: Any, g: Any, window: Any, size: tuple[int, int], precision: str) -> tuple[int, ...]:
    return numbers(x.shape, (g.shape[1], x.shape[1], *size), g.shape, window, precision)


FORWARD = CKernel(
    "conv.c",
    "conv2d",
    _forward_numbers,
    items=lambda x, w, window, precision: not _suits_batch(w.shape, window, _output(x, w, window)[2:]),
    scratch=_forward_scratch,
    prepared=_forward_prepared,
    definitions=STRUCTS,
)
INPUT_GRAD = CKernel(
    "conv.c",
    "conv2d_input_grad",
    _input_grad_numbers,
    items=lambda g, w, window, size, precision: not _suits_batch(w.shape, window, size),
    scratch=_input_grad_scratch,
    prepared=_input_grad_prepared,
    definitions=STRUCTS,
)
WEIGHT_GRAD = CKernel(
    "conv_weight_grad.c",
    "conv2d_weight_grad",
    _weight_grad_numbers,
    items=lambda *types, **params: not _suits_batch_sum(*types, **params),
    sums=True,
    scratch=_weight_grad_scratch,
)
WEIGHT_GRAD_BY_IMAGE = CKernel(
    "conv_weight_grad.c",
    "conv2d_weight_grad_by_image",
    _weight_grad_numbers,
    items=True,
    scratch=_weight_grad_scratch,
)

MIN_CHANNELS, MIN_LENGTH = 16, 3
"""Minimum input and output channels, and minimum rows and columns of the output, for Winograd's method."""
MIN_TILES = 4
"""Minimum tiles of an image for Winograd's weight gradient by image."""
BATCH_CHANNELS, BATCH_TILES, BATCH_SUM_TILES = 64, 15, 16
"""For Winograd's method on all images at once: minimum input channels, with which transformed weights do not fit in L2;
maximum tiles of an image; the same for the weight gradient. The number of output channels does not decide, because it
can be that of several members of a sweep."""
BLOCK_BYTES, MIN_BLOCK, MAX_BLOCK = 1 << 18, 12, 48
"""Bytes of transformed patches and products of a block of tiles, which fit into L2; minimum and maximum of tiles."""
CHUNK, MAX_TILES = 64, 64
"""Channels of which weights are transformed together, a macro of `conv_winograd_batch.c`; maximum tiles of a block."""
TILE, SPAN = 4, 6
"""Rows and columns of a tile of outputs, and of the patch that it is computed from (winograd.h)."""
POSITIONS = SPAN**2


def _suits_winograd(w: Any, window: Any, size: tuple[int, int]) -> bool:
    plain = window.stride == window.dilation == (1, 1) and window.groups == 1 and tuple(w[2:]) == (3, 3)
    return plain and max(window.padding) <= 2 and min(w[:2]) >= MIN_CHANNELS and min(size) >= MIN_LENGTH


def _tiles(size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of tiles."""
    return -(-size[0] // TILE), -(-size[1] // TILE)


def _suits_batch(w: Any, window: Any, size: tuple[int, int], most: int = BATCH_TILES) -> bool:
    """Whether Winograd's method takes all images of up to ``most`` tiles at once."""
    few_tiles = math.prod(_tiles(size)) <= most
    return w[1] >= BATCH_CHANNELS and few_tiles and _suits_winograd(w, window, size)


def _suits_batch_sum(x: Any, g: Any, window: Any, size: tuple[int, int], precision: str) -> bool:
    """Whether Winograd's weight gradient takes all images at once."""
    return _suits_batch(_weight_shape(x, g, size), window, g.shape[2:], BATCH_SUM_TILES)


@dataclass(frozen=True)
class _WinogradSizes:
    """Sizes of arrays in `kernels/cpu/conv_winograd.c`, for the longest vectors.

    Attributes:
        channels: of the convolution's argument; for the input gradient, of the output's gradient.
        out: channels of its result.
        size: rows and columns of the output.
    """

    channels: int
    out: int
    size: tuple[int, int]
    itemsize: int

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return _tiles(self.size)

    def _padded(self, channels: int, vectors: int = 1) -> int:
        lanes = vectors * CACHE_LINE // self.itemsize
        return -(-channels // lanes) * lanes

    @property
    def block_tiles(self) -> int:
        """Tiles of a block."""
        one = POSITIONS * (self._padded(self.channels) + self._padded(self.out)) * self.itemsize
        return min(self.tiles[0] * self.tiles[1], max(MIN_BLOCK, min(MAX_BLOCK, BLOCK_BYTES // one)))

    @property
    def weights(self) -> int:
        """Bytes of the packed weights, and of a bool behind them."""
        return aligned_bytes(POSITIONS * self.channels * self._padded(self.out, 2) * self.itemsize)

    @property
    def scratch(self) -> int:
        """Bytes of patches, products, magnitudes of the image's pixels, a bool for each tile, image and outputs."""
        (rows, columns), lanes = self.tiles, CACHE_LINE // self.itemsize
        patches = self.block_tiles * self._padded(self.channels) + lanes
        products = self.block_tiles * self._padded(self.out, 2) + lanes
        pixels = (TILE * rows + 2) * (TILE * columns + 2)
        image, output = pixels * self._padded(self.channels), TILE**2 * rows * columns * self._padded(self.out)
        arrays = (POSITIONS * patches, POSITIONS * products, pixels, image, output)
        return aligned_bytes(rows * columns, *(n * self.itemsize for n in arrays))

    @property
    def block_images(self) -> int:
        """Images of a block of `kernels/cpu/conv_winograd_batch.c`."""
        return max(1, MAX_TILES // math.prod(self.tiles))

    @property
    def batch_scratch(self) -> int:
        """Bytes for a block: magnitudes of pixels, bools of tiles, images, patches, the output or its gradient for a
        panel, products or transformed gradients, a chunk of weights or sums, and the weight gradient from them."""
        (rows, columns), lanes, panel = self.tiles, CACHE_LINE // self.itemsize, 2 * CACHE_LINE // self.itemsize
        tiles, pixels = self.block_images * rows * columns, (TILE * rows + 2) * (TILE * columns + 2)
        patches = POSITIONS * (tiles * -(-self.channels // CHUNK) * CHUNK + lanes)
        products, chunk = POSITIONS * (tiles * panel + lanes), POSITIONS * (CHUNK * panel + lanes)
        arrays = (
            pixels, self.block_images * pixels * self._padded(self.channels), patches, tiles * TILE**2 * panel,
            products, max(chunk, self.channels * panel), (9 * CHUNK + lanes) * panel,
        )  # fmt: skip
        return aligned_bytes(tiles, tiles, *(n * self.itemsize for n in arrays))

    @property
    def collected(self) -> int:
        """Bytes of the sums of the weight gradient, and of the gradient with channels last."""
        lanes, out = CACHE_LINE // self.itemsize, self._padded(self.out)
        return aligned_bytes(
            *(n * self.itemsize for n in (POSITIONS * (self.channels * out + lanes), (9 * self.channels + lanes) * out))
        )


def _of_forward(x: Any, w: Any, window: Any) -> _WinogradSizes:
    return _WinogradSizes(w.shape[1], w.shape[0], _output(x, w, window)[2:], x.dtype.itemsize)


def _of_input_grad(g: Any, w: Any, size: tuple[int, int]) -> _WinogradSizes:
    return _WinogradSizes(w.shape[0], w.shape[1], size, g.dtype.itemsize)


def _of_weight_grad(x: Any, g: Any) -> _WinogradSizes:
    return _WinogradSizes(x.shape[1], g.shape[1], g.shape[2:], x.dtype.itemsize)


def _weight_shape(x: Any, g: Any, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """The shape of the weights, without groups."""
    return (g.shape[1], x.shape[1], *size)


FORWARD_WINOGRAD = CKernel(
    "conv_winograd.c",
    "conv2d_winograd",
    lambda x, w, window, precision: (
        *_forward_numbers(x, w, window, precision),
        _of_forward(x, w, window).block_tiles,
    ),
    items=lambda x, w, window, precision: (
        _suits_winograd(w.shape, window, _output(x, w, window)[2:])
        and not _suits_batch(w.shape, window, _output(x, w, window)[2:])
    ),
    scratch=lambda x, w, window, precision: _of_forward(x, w, window).scratch,
    prepared=lambda x, w, window, precision: _of_forward(x, w, window).weights,
)
INPUT_GRAD_WINOGRAD = CKernel(
    "conv_winograd.c",
    "conv2d_input_grad_winograd",
    lambda g, w, window, size, precision: (
        *_input_grad_numbers(g, w, window, size, precision),
        _of_input_grad(g, w, size).block_tiles,
    ),
    items=lambda g, w, window, size, precision: (
        _suits_winograd(w.shape, window, size) and not _suits_batch(w.shape, window, size)
    ),
    scratch=lambda g, w, window, size, precision: _of_input_grad(g, w, size).scratch,
    prepared=lambda g, w, window, size, precision: _of_input_grad(g, w, size).weights,
)
WEIGHT_GRAD_WINOGRAD = CKernel(
    "conv_winograd.c",
    "conv2d_weight_grad_winograd",
    lambda x, g, window, size, precision: (
        *_weight_grad_numbers(x, g, window, size, precision),
        _of_weight_grad(x, g).block_tiles,
    ),
    items=lambda x, g, window, size, precision: (
        _suits_winograd(_weight_shape(x, g, size), window, g.shape[2:])
        and math.prod(_tiles(g.shape[2:])) >= MIN_TILES
        and not _suits_batch_sum(x, g, window, size, precision)
    ),
    sums=True,
    scratch=lambda x, g, window, size, precision: _of_weight_grad(x, g).scratch,
    collected=lambda x, g, window, size, precision: _of_weight_grad(x, g).collected,
)
WEIGHT_GRAD_BY_IMAGE_WINOGRAD = CKernel(
    "conv_winograd.c",
    "conv2d_weight_grad_by_image_winograd",
    lambda x, g, window, size, precision: (
        *_weight_grad_numbers(x, g, window, size, precision),
        _of_weight_grad(x, g).block_tiles,
        _of_weight_grad(x, g).collected,
    ),
    items=lambda x, g, window, size, precision: (
        _suits_winograd(_weight_shape(x, g, size), window, g.shape[2:]) and math.prod(_tiles(g.shape[2:])) >= MIN_TILES
    ),
    scratch=lambda x, g, window, size, precision: _of_weight_grad(x, g).scratch + _of_weight_grad(x, g).collected,
)


def _batch(
    name: str, numbers: Callable[..., tuple[int, ...]], sizes: Callable[..., _WinogradSizes], suits: Callable[..., bool]
) -> CKernel:
    """The function that takes all images at once."""
    return CKernel(
        "conv_winograd_batch.c",
        f"{name}_winograd_batch",
        lambda x, *types, **params: (
            *numbers(x, *types, **params),
            x.shape[0],
            sizes(x, *types, **params).block_images,
        ),
        suits=suits,
        team=True,
        scratch=lambda *types, **params: sizes(*types, **params).batch_scratch,
        definitions={"CHUNK": CHUNK},
    )


VECTOR_CHANNELS = 16
"""Channels are the vector axis of a convolution with a stride if their numbers are multiples of this."""


def _channels_last_items(w: Any, window: Any) -> bool:
    plain = max(window.stride) > 1 and window.dilation == (1, 1) and window.groups == 1
    return plain and all(n > 0 and n % VECTOR_CHANNELS == 0 for n in w.shape[:2])


def _channels_last_weights(w: Any) -> int:
    o, c, kh, kw = w.shape
    panel = 2 * CACHE_LINE // w.dtype.itemsize
    return max(-(-o // panel) * c, -(-c // panel) * o) * panel * kh * kw * w.dtype.itemsize


def _channels_last_scratch(x: Any, w: Any, window: Any, precision: str) -> int:
    (_, o, *out), (c, *size) = _output(x, w, window), x.shape[1:]
    rows, columns = (
        max((n - 1) * s + k, p + length)
        for n, s, k, p, length in zip(out, window.stride, w.shape[2:], window.padding, size, strict=True)
    )
    lanes = CACHE_LINE // x.dtype.itemsize
    return aligned_bytes((rows * columns * c + lanes) * x.dtype.itemsize, math.prod(out) * o * x.dtype.itemsize)


def _input_grad_channels_last_scratch(g: Any, w: Any, window: Any, size: tuple[int, int], precision: str) -> int:
    o, c, *kernel = w.shape
    rows, columns = (
        (k - 1) // s + max(n, -(-(length + p) // s))
        for n, s, k, p, length in zip(g.shape[2:], window.stride, kernel, window.padding, size, strict=True)
    )
    lanes = CACHE_LINE // g.dtype.itemsize
    return aligned_bytes((rows * columns * o + lanes) * g.dtype.itemsize, math.prod(size) * c * g.dtype.itemsize)


FORWARD_CHANNELS_LAST = CKernel(
    "conv_channels_last.c",
    "conv2d_channels_last",
    _forward_numbers,
    items=lambda x, w, window, precision: _channels_last_items(w, window),
    scratch=_channels_last_scratch,
    prepared=lambda x, w, window, precision: _channels_last_weights(w),
)
INPUT_GRAD_CHANNELS_LAST = CKernel(
    "conv_channels_last.c",
    "conv2d_input_grad_channels_last",
    _input_grad_numbers,
    items=lambda g, w, window, size, precision: _channels_last_items(w, window),
    scratch=_input_grad_channels_last_scratch,
    prepared=lambda g, w, window, size, precision: _channels_last_weights(w),
)

FORWARD_BATCH = _batch(
    "conv2d",
    _forward_numbers,
    lambda x, w, window, precision: _of_forward(x, w, window),
    lambda x, w, window, precision: _suits_batch(w.shape, window, _output(x, w, window)[2:]),
)
INPUT_GRAD_BATCH = _batch(
    "conv2d_input_grad",
    _input_grad_numbers,
    lambda g, w, window, size, precision: _of_input_grad(g, w, size),
    lambda g, w, window, size, precision: _suits_batch(w.shape, window, size),
)
WEIGHT_GRAD_BATCH = _batch(
    "conv2d_weight_grad",
    _weight_grad_numbers,
    lambda x, g, window, size, precision: _of_weight_grad(x, g),
    _suits_batch_sum,
)

register("conv2d", "cpu", (FORWARD_WINOGRAD, FORWARD_CHANNELS_LAST, FORWARD, FORWARD_BATCH))
register("conv2d_input_grad", "cpu", (INPUT_GRAD_WINOGRAD, INPUT_GRAD_CHANNELS_LAST, INPUT_GRAD, INPUT_GRAD_BATCH))
register("conv2d_weight_grad", "cpu", (WEIGHT_GRAD_WINOGRAD, WEIGHT_GRAD, WEIGHT_GRAD_BATCH))
register("conv2d_weight_grad_by_image", "cpu", (WEIGHT_GRAD_BY_IMAGE_WINOGRAD, WEIGHT_GRAD_BY_IMAGE))


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
    """Whether the C functions support this convolution and pooling, and are faster than the dense ones by image.

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
        items=lambda g, where, w, window, windows, shape, size, precision: (
            _handled(window, windows, g, shape, w.shape[1] * w.shape[3]) and not _suits_batch(w.shape, window, size)
        ),
        scratch=pooled_input_grad_scratch,
        prepared=pooled_input_grad_prepared,
    ),
)


def _pooled_weight_grad(name: str, sums: bool) -> CKernel:
    return CKernel(
        "conv_pooled.c",
        name,
        lambda x, g, where, window, windows, shape, size, precision: pooled_numbers(
            x.shape, (shape[1], x.shape[1], *size), shape, g.shape, window, windows, g.dtype.itemsize, precision
        ),
        items=lambda x, g, where, window, windows, shape, size, precision: (
            _handled(window, windows, g, shape, x.shape[1] * size[1])
            and not _suits_batch((shape[1], x.shape[1], *size), window, shape[2:])
        ),
        sums=sums,
        scratch=pooled_weight_grad_scratch,
    )


for _name, _sums in (("conv2d_weight_grad_pooled", True), ("conv2d_weight_grad_by_image_pooled", False)):
    register(_name, "cpu", _pooled_weight_grad(_name, _sums))


def _pooling(name: str, numbers: Callable[..., tuple[int, ...]]) -> CKernel:
    return CKernel("pool.c", name, numbers, items=True)


def _pool_numbers(x_shape: Sequence[int], y_shape: Sequence[int], windows: Any) -> tuple[int, ...]:
    """POOL_NUMBERS of `kernels/cpu/pool.c`."""
    return (*x_shape[1:], *y_shape[2:], *windows.kernel, *windows.stride, *windows.padding)


def _pooled_numbers(x: Any, windows: Any) -> tuple[int, ...]:
    return _pool_numbers(x.shape, windows.output_shape("pooling", x.shape), windows)


register("max_pool2d", "cpu", _pooling("max_pool2d", _pooled_numbers))
register(
    "max_pool2d_put",
    "cpu",
    _pooling("max_pool2d_put", lambda ct, where, windows, shape: _pool_numbers(shape, ct.shape, windows)),
)
register(
    "max_pool2d_pick",
    "cpu",
    _pooling("max_pool2d_pick", lambda x, where, windows: _pool_numbers(x.shape, where.shape, windows)),
)
register("avg_pool2d", "cpu", _pooling("avg_pool2d", _pooled_numbers))
register(
    "avg_pool2d_put",
    "cpu",
    _pooling("avg_pool2d_put", lambda ct, windows, shape: _pool_numbers(shape, ct.shape, windows)),
)
