"""The C functions for convolutions and pooling: which of `kernels/cpu` each primitive calls, on one image at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from adtrain.core.kernel import CKernel, register, value_for
from adtrain.core.types import Shape
from adtrain.lowering.cpu.products import in_full

CACHE_LINE = 64
"""Bytes to which each part of a function's scratch is rounded up; vectors may read that far past its end."""

STRUCTS = {"CORRELATION_BYTES": 168, "TAP_BYTES": 8, "SPAN_BYTES": 20, "MAX_VECTORS": 4}
"""Macros of `conv.c`: bytes of its structs; maximum spans of a tile."""
CORRELATION, TAP_BYTES, SPAN_BYTES, MAX_VECTORS = STRUCTS.values()

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
VECTOR_CHANNELS = 16
"""Channels are the vector axis of a convolution with a stride if their numbers are multiples of this."""
CACHED_BYTES = 24 << 10
"""Bytes of an image that are reread for each strip: most of an L1 cache."""
MIN_RUN_BYTES = 16
"""Bytes of a kernel row from which on its vectors are full enough."""


def aligned_bytes(*parts: int) -> int:
    return sum(-(-part // CACHE_LINE) * CACHE_LINE for part in parts) + CACHE_LINE


@dataclass(frozen=True)
class Conv:
    """A convolution, or a gradient of one.

    Attributes:
        image, weight, output: shapes. The weight of a weight gradient is that of one group.
        images: the number of images of the first argument.
        channels, out: channels of the first argument and of the result, and for a weight gradient of image and output.
        size: rows and columns of the result, and for a weight gradient of the output.
        most_tiles: of an image, with which Winograd's method takes all images at once.
        pooled, windows: if the kernel reads a pooled gradient, its shape and the windows of the pooling.
    """

    image: Shape
    weight: Shape
    output: Shape
    images: int
    channels: int
    out: int
    size: Shape
    itemsize: int
    window: Any
    precision: str
    most_tiles: int = BATCH_TILES
    pooled: Shape = ()
    windows: Any = None

    @property
    def numbers(self) -> tuple[int, ...]:
        """CONV_NUMBERS of `kernels/cpu/conv.h`."""
        in_full("conv2d", self.precision)
        (_, c, h, w), (o, _, kh, kw), window = self.image, self.weight, self.window
        found = (c, h, w, o, *self.output[2:], kh, kw, *window.stride, *window.padding, *window.dilation, window.groups)
        return tuple(map(int, found))

    @property
    def weight_bytes(self) -> int:
        return math.prod(self.weight) * self.itemsize

    @property
    def forward_scratch(self) -> int:
        axes = zip(self.output[2:], self.weight[2:], self.window.dilation, self.window.stride, strict=True)
        lengths = [n + (k - 1) * d // s for n, k, d, s in axes]
        return aligned_bytes(self.image[1] * math.prod((*self.window.stride, *lengths)) * self.itemsize)

    @property
    def forward_prepared(self) -> int:
        (_, _, oh, ow), (_, c, kh, kw) = self.output, self.weight
        spans = SPAN_BYTES * (oh * ow + MAX_VECTORS)
        return aligned_bytes(CORRELATION, TAP_BYTES * c * kh * kw, 4 * kh, spans, self.weight_bytes)

    @property
    def input_grad_scratch(self) -> int:
        window = self.window
        axes = zip(self.size, self.weight[2:], window.padding, window.dilation, window.stride, strict=True)
        lengths = [-(-(n + p) // s) + (k - 1) * d // s - p // s for n, k, p, d, s in axes]
        return aligned_bytes(self.weight[0] * math.prod(lengths) * self.itemsize)

    @property
    def input_grad_prepared(self) -> int:
        (o, _, kh, kw), (sh, sw) = self.weight, self.window.stride
        taps, spans = o // self.window.groups * kh * kw, math.prod(self.size) + MAX_VECTORS * sh * sw
        parts = CORRELATION * sh * sw, TAP_BYTES * taps, 4 * kh * sw, SPAN_BYTES * spans
        return aligned_bytes(*parts, self.weight_bytes)

    @property
    def weight_grad_scratch(self) -> int:
        (_, c, h, w), (ph, pw), out = self.image, self.window.padding, self.output[2:]
        kernel = self.weight[2:]
        padded = c * (h + 2 * ph) * (w + 2 * pw) * self.itemsize
        axes = zip(out, kernel, self.window.dilation, self.window.stride, strict=True)
        planes = c * math.prod((n + (k - 1) * d // s) * s for n, k, d, s in axes) * self.itemsize
        taps = c // self.window.groups * math.prod(kernel)
        return aligned_bytes(4 * taps, 2 * CACHE_LINE * math.prod(out), max(padded, planes))

    @property
    def suits_winograd(self) -> bool:
        window, w = self.window, self.weight
        plain = window.stride == window.dilation == (1, 1) and window.groups == 1 and tuple(w[2:]) == (3, 3)
        return plain and max(window.padding) <= 2 and min(w[:2]) >= MIN_CHANNELS and min(self.size) >= MIN_LENGTH

    @property
    def suits_batch(self) -> bool:
        """Whether Winograd's method takes all images at once."""
        few_tiles = math.prod(self.tiles) <= self.most_tiles
        return self.weight[1] >= BATCH_CHANNELS and few_tiles and self.suits_winograd

    @property
    def by_image(self) -> bool:
        return self.suits_winograd and not self.suits_batch

    @property
    def many_tiles(self) -> bool:
        return self.suits_winograd and math.prod(self.tiles) >= MIN_TILES

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return -(-self.size[0] // TILE), -(-self.size[1] // TILE)

    # Sizes of arrays in `kernels/cpu/conv_winograd.c`, for the longest vectors:

    def _padded(self, channels: int, vectors: int = 1) -> int:
        lanes = vectors * CACHE_LINE // self.itemsize
        return -(-channels // lanes) * lanes

    @property
    def block_tiles(self) -> int:
        """Tiles of a block."""
        one = POSITIONS * (self._padded(self.channels) + self._padded(self.out)) * self.itemsize
        return min(math.prod(self.tiles), max(MIN_BLOCK, min(MAX_BLOCK, BLOCK_BYTES // one)))

    @property
    def winograd_weights(self) -> int:
        """Bytes of the packed weights, and of a bool behind them."""
        return aligned_bytes(POSITIONS * self.channels * self._padded(self.out, 2) * self.itemsize)

    @property
    def winograd_scratch(self) -> int:
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
        sums, gradient = POSITIONS * (self.channels * out + lanes), (9 * self.channels + lanes) * out
        return aligned_bytes(sums * self.itemsize, gradient * self.itemsize)

    # Of `kernels/cpu/conv_channels_last.c`:

    @property
    def suits_channels_last(self) -> bool:
        plain = max(self.window.stride) > 1 and self.window.dilation == (1, 1) and self.window.groups == 1
        return plain and all(n > 0 and n % VECTOR_CHANNELS == 0 for n in self.weight[:2])

    @property
    def channels_last_weights(self) -> int:
        o, c, kh, kw = self.weight
        panel = 2 * CACHE_LINE // self.itemsize
        return max(-(-o // panel) * c, -(-c // panel) * o) * panel * kh * kw * self.itemsize

    @property
    def forward_channels_last(self) -> int:
        """Bytes of scratch."""
        window = self.window
        axes = zip(self.output[2:], window.stride, self.weight[2:], window.padding, self.image[2:], strict=True)
        return self._channels_last(max((n - 1) * s + k, p + length) for n, s, k, p, length in axes)

    @property
    def input_grad_channels_last(self) -> int:
        """Bytes of scratch."""
        window = self.window
        axes = zip(self.output[2:], window.stride, self.weight[2:], window.padding, self.size, strict=True)
        return self._channels_last((k - 1) // s + max(n, -(-(length + p) // s)) for n, s, k, p, length in axes)

    def _channels_last(self, lengths: Any) -> int:
        lanes = CACHE_LINE // self.itemsize
        padded, result = math.prod(lengths) * self.channels + lanes, math.prod(self.size) * self.out
        return aligned_bytes(padded * self.itemsize, result * self.itemsize)

    # Of `kernels/cpu/conv_pooled.c`:

    @property
    def pooled_numbers(self) -> tuple[int, ...]:
        return (*self.numbers, *self.pooled[2:], *self.windows.kernel, *self.windows.stride, self.strip)

    @property
    def strip(self) -> int:
        """Rows of windows over the rows of the image that CACHED_BYTES hold."""
        row = (self.image[3] + 2 * self.window.padding[1]) * self.image[1] * self.itemsize
        return int(max(1, min(self.pooled[2], CACHED_BYTES // (row * self.windows.stride[0]))))

    @property
    def _padded_image(self) -> int:
        (_, c, h, w), (ph, pw) = self.image, self.window.padding
        return int((h + 2 * ph) * (w + 2 * pw) * c * self.itemsize)

    @property
    def pooled_input_grad_scratch(self) -> int:
        (_, _, ph, pw), area = self.pooled, math.prod(self.windows.kernel)
        live = self.strip * pw * area * self.weight[0] + 1
        return aligned_bytes(4 * ph * pw * area, live * 2 * self.itemsize, self._padded_image)

    @property
    def pooled_input_grad_prepared(self) -> int:
        """Runs of weights, each up to a vector longer."""
        o, c, kh, kw = self.weight
        return aligned_bytes(o * kh * (kw * c * self.itemsize + CACHE_LINE))

    @property
    def pooled_weight_grad_scratch(self) -> int:
        (_, o, _, pw), (kh, kw), c = self.pooled, self.weight[2:], self.image[1]
        live = self.strip * pw * o + 1
        sums, one = o * kh * (kw * c * self.itemsize + CACHE_LINE), kh * kw * c * self.itemsize + CACHE_LINE
        area = math.prod(self.windows.kernel)
        return aligned_bytes(4 * area, 4 * o, live * 2 * self.itemsize, sums, one, self._padded_image)

    @property
    def suits_pooled(self) -> bool:
        """Whether the C functions support this convolution and pooling, and are faster than the dense ones by image.

        A product takes them about twice as long, and short kernel rows do not fill vectors.
        """
        window = self.window
        if window.stride != (1, 1) or window.dilation != (1, 1) or window.groups != 1 or self.windows.padding != (0, 0):
            return False
        if self.weight[1] * self.weight[3] * self.itemsize < MIN_RUN_BYTES or self.suits_batch:
            return False
        return math.prod(self.output[2:]) >= 2 * math.prod(self.pooled[2:])


def _forward(x: Any, w: Any, window: Any, precision: str) -> Conv:
    rows, columns = (window.output_length(i, x.shape[i + 2], w.shape[i + 2]) for i in (0, 1))
    output = (1, w.shape[0], rows, columns)
    channels, out = w.shape[1], w.shape[0]
    return Conv(x.shape, w.shape, output, x.shape[0], channels, out, output[2:], x.dtype.itemsize, window, precision)


def _input_grad(g: Any, w: Any, window: Any, size: Shape, precision: str, **pooling: Any) -> Conv:
    image, output = (1, w.shape[1] * window.groups, *size), pooling.pop("output", g.shape)
    channels, out = w.shape[:2]
    return Conv(image, w.shape, output, g.shape[0], channels, out, size, g.dtype.itemsize, window, precision, **pooling)


def _weight_grad(x: Any, g: Any, window: Any, size: Shape, precision: str, **more: Any) -> Conv:
    output = more.pop("output", g.shape)
    weight = (output[1], x.shape[1], *size)
    return Conv(
        x.shape, weight, output, x.shape[0], x.shape[1], output[1], output[2:], x.dtype.itemsize, window, precision,
        **more,
    )  # fmt: skip


def _weight_grad_of_all(x: Any, g: Any, **params: Any) -> Conv:
    return _weight_grad(x, g, **params, most_tiles=BATCH_SUM_TILES)


def _pooled_input_grad(g: Any, where: Any, w: Any, windows: Any, shape: Shape, **params: Any) -> Conv:
    return _input_grad(g, w, **params, output=shape, pooled=g.shape, windows=windows)


def _pooled_weight_grad(x: Any, g: Any, where: Any, windows: Any, shape: Shape, **params: Any) -> Conv:
    return _weight_grad(x, g, **params, output=shape, pooled=g.shape, windows=windows)


Number: TypeAlias = Callable[[Conv], Any]


def _kernel(
    file: str,
    name: str,
    of: Callable[..., Conv],
    numbers: Number = lambda c: c.numbers,
    items: bool | Number = True,
    definitions: dict[str, int] | None = None,
    sums: bool = False,
    team: bool = False,
    **fields: Number,
) -> CKernel:
    """A C function. Its fields are functions of the `Conv` that ``of`` makes of types and parameters."""

    def field(value: Any) -> Callable[..., Any]:
        return lambda *types, **params: value_for(value, of(*types, **params))

    functions: Any = {key: field(value) for key, value in {"suits" if team else "items": items, **fields}.items()}
    return CKernel(file, name, field(numbers), sums=sums, team=team, definitions=definitions or {}, **functions)


def _batch(name: str, of: Callable[..., Conv]) -> CKernel:
    """The function that takes all images at once."""
    return _kernel(
        "conv_winograd_batch.c",
        f"{name}_winograd_batch",
        of,
        lambda c: (*c.numbers, c.images, c.block_images),
        lambda c: c.suits_batch,
        {"CHUNK": CHUNK},
        team=True,
        scratch=lambda c: c.batch_scratch,
    )


def _winograd(name: str, of: Callable[..., Conv], items: Number, **fields: Any) -> CKernel:
    given = {"numbers": lambda c: (*c.numbers, c.block_tiles), "scratch": lambda c: c.winograd_scratch, **fields}
    return _kernel("conv_winograd.c", f"{name}_winograd", of, items=items, **given)


FORWARD = _kernel(
    "conv.c",
    "conv2d",
    _forward,
    items=lambda c: not c.suits_batch,
    definitions=STRUCTS,
    scratch=lambda c: c.forward_scratch,
    prepared=lambda c: c.forward_prepared,
)
INPUT_GRAD = _kernel(
    "conv.c",
    "conv2d_input_grad",
    _input_grad,
    items=lambda c: not c.suits_batch,
    definitions=STRUCTS,
    scratch=lambda c: c.input_grad_scratch,
    prepared=lambda c: c.input_grad_prepared,
)
WEIGHT_GRAD = _kernel(
    "conv_weight_grad.c",
    "conv2d_weight_grad",
    _weight_grad_of_all,
    items=lambda c: not c.suits_batch,
    sums=True,
    scratch=lambda c: c.weight_grad_scratch,
)
WEIGHT_GRAD_BY_IMAGE = _kernel(
    "conv_weight_grad.c", "conv2d_weight_grad_by_image", _weight_grad, scratch=lambda c: c.weight_grad_scratch
)
FORWARD_WINOGRAD = _winograd("conv2d", _forward, lambda c: c.by_image, prepared=lambda c: c.winograd_weights)
INPUT_GRAD_WINOGRAD = _winograd(
    "conv2d_input_grad", _input_grad, lambda c: c.by_image, prepared=lambda c: c.winograd_weights
)
WEIGHT_GRAD_WINOGRAD = _winograd(
    "conv2d_weight_grad",
    _weight_grad_of_all,
    lambda c: c.many_tiles and not c.suits_batch,
    sums=True,
    collected=lambda c: c.collected,
)
WEIGHT_GRAD_BY_IMAGE_WINOGRAD = _winograd(
    "conv2d_weight_grad_by_image",
    _weight_grad,
    lambda c: c.many_tiles,
    numbers=lambda c: (*c.numbers, c.block_tiles, c.collected),
    scratch=lambda c: c.winograd_scratch + c.collected,
)
FORWARD_CHANNELS_LAST = _kernel(
    "conv_channels_last.c",
    "conv2d_channels_last",
    _forward,
    items=lambda c: c.suits_channels_last,
    scratch=lambda c: c.forward_channels_last,
    prepared=lambda c: c.channels_last_weights,
)
INPUT_GRAD_CHANNELS_LAST = _kernel(
    "conv_channels_last.c",
    "conv2d_input_grad_channels_last",
    _input_grad,
    items=lambda c: c.suits_channels_last,
    scratch=lambda c: c.input_grad_channels_last,
    prepared=lambda c: c.channels_last_weights,
)
FORWARD_BATCH = _batch("conv2d", _forward)
INPUT_GRAD_BATCH = _batch("conv2d_input_grad", _input_grad)
WEIGHT_GRAD_BATCH = _batch("conv2d_weight_grad", _weight_grad_of_all)

register("conv2d", "cpu", (FORWARD_WINOGRAD, FORWARD_CHANNELS_LAST, FORWARD, FORWARD_BATCH))
register("conv2d_input_grad", "cpu", (INPUT_GRAD_WINOGRAD, INPUT_GRAD_CHANNELS_LAST, INPUT_GRAD, INPUT_GRAD_BATCH))
register("conv2d_weight_grad", "cpu", (WEIGHT_GRAD_WINOGRAD, WEIGHT_GRAD, WEIGHT_GRAD_BATCH))
register("conv2d_weight_grad_by_image", "cpu", (WEIGHT_GRAD_BY_IMAGE_WINOGRAD, WEIGHT_GRAD_BY_IMAGE))


def _register_pooled(name: str, of: Callable[..., Conv], sums: bool = False, **fields: Any) -> None:
    kernel = _kernel(
        "conv_pooled.c", name, of, lambda c: c.pooled_numbers, lambda c: c.suits_pooled, None, sums, **fields
    )
    register(name, "cpu", kernel)


_register_pooled(
    "conv2d_input_grad_pooled",
    _pooled_input_grad,
    scratch=lambda c: c.pooled_input_grad_scratch,
    prepared=lambda c: c.pooled_input_grad_prepared,
)
for _name, _sums in (("conv2d_weight_grad_pooled", True), ("conv2d_weight_grad_by_image_pooled", False)):
    _register_pooled(_name, _pooled_weight_grad, _sums, scratch=lambda c: c.pooled_weight_grad_scratch)


def _pool_numbers(x_shape: Sequence[int], y_shape: Sequence[int], windows: Any) -> tuple[int, ...]:
    """POOL_NUMBERS of `kernels/cpu/pool.c`."""
    return (*x_shape[1:], *y_shape[2:], *windows.kernel, *windows.stride, *windows.padding)


def _pooled_numbers(x: Any, windows: Any) -> tuple[int, ...]:
    return _pool_numbers(x.shape, windows.output_shape("pooling", x.shape), windows)


_POOLING: dict[str, Callable[..., tuple[int, ...]]] = {
    "max_pool2d": _pooled_numbers,
    "max_pool2d_put": lambda ct, where, windows, shape: _pool_numbers(shape, ct.shape, windows),
    "max_pool2d_pick": lambda x, where, windows: _pool_numbers(x.shape, where.shape, windows),
    "avg_pool2d": _pooled_numbers,
    "avg_pool2d_put": lambda ct, windows, shape: _pool_numbers(shape, ct.shape, windows),
}
for _name, _numbers in _POOLING.items():
    register(_name, "cpu", CKernel("pool.c", _name, _numbers, items=True))
