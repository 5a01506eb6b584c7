"""Compiled code at odd sizes: one row, one column, one item, lengths beside multiples of vectors, and none at all."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from compiled_parity import TOLERANCE, Function, check_all

import adtrain as ad
from adtrain import ops
from adtrain.backends.cpu.codegen import loops
from adtrain.core.kernel import value_for
from adtrain.lowering.cpu.conv import FORWARD_BATCH, FORWARD_WINOGRAD
from adtrain.ops.conv import Window

pytestmark = pytest.mark.compiled


class Draw:
    """Numbers of one dtype, always the same ones."""

    def __init__(self, dtype: str) -> None:
        self.rng = np.random.default_rng(0)
        self.dtype = dtype

    def __call__(self, *shape: int) -> np.ndarray:
        return self.rng.normal(size=shape).astype(self.dtype)


def with_gradients(f: Any) -> Any:
    """The value of ``f``, and the pullback of the squares of its elements to each argument."""

    def work(*xs: Any) -> Any:
        out, pullback = ad.vjp(f, *xs)
        return out, pullback(ops.square(out))

    return work


PRODUCTS = [  # M, K, N
    (1, 1, 1), (1, 9, 5), (7, 1, 9), (9, 17, 1), (8, 16, 32), (33, 7, 65), (31, 64, 15), (2, 0, 3), (0, 3, 4), (4, 3, 0)
]  # fmt: skip


def products(draw: Draw) -> Iterator[tuple[str, Function]]:
    for (m, k, n), ta, tb in product(PRODUCTS, (False, True), (False, True)):
        a, b = draw(*((k, m) if ta else (m, k))), draw(*((n, k) if tb else (k, n)))
        yield f"{m}x{k}x{n} {ta} {tb}", (lambda a, b, ta=ta, tb=tb: ops.matmul(a, b, ta, tb), [a, b])
    for batch, (m, k, n), ta, tb in product((1, 7), [(1, 3, 5), (9, 4, 8)], (False, True), (False, True)):
        a, b = draw(batch, *((k, m) if ta else (m, k))), draw(batch, *((n, k) if tb else (k, n)))
        yield f"{batch} of {m}x{k}x{n} {ta} {tb}", (lambda a, b, ta=ta, tb=tb: ops.matmul(a, b, ta, tb), [a, b])


def epilogues(draw: Draw) -> Iterator[tuple[str, Function]]:
    for m, k, n in PRODUCTS:
        a, b, whole = draw(m, k), draw(k, n), draw(m, n)
        others = {"row": draw(n), "rows": draw(1, n), "column": draw(m, 1), "number": draw(), "all": whole}
        for kind, other in others.items():
            yield f"{m}x{k}x{n} + {kind}", (lambda a, b, c: ops.relu(ops.matmul(a, b) + c), [a, b, other])
        yield f"{m}x{k}x{n} twice", (lambda a, b, c: (p := ops.matmul(a, b), ops.tanh(p * c) - p, c + p), [a, b, whole])
        yield f"{m}x{k}x{n} mask", (lambda a, b, c: ops.where(ops.less(c, 0.0), ops.matmul(a, b), c), [a, b, whole])
    for batch, (m, k, n) in product((1, 3), [(1, 3, 5), (9, 4, 8), (33, 7, 65), (4, 3, 1)]):
        a, b = draw(batch, m, k), draw(batch, k, n)
        shapes = [(batch, 1, 1), (batch, 1, n), (batch, m, 1), (batch, m, n), (1, m, n), (m, 1), (n,), ()]
        for shape in dict.fromkeys(shapes):
            other = draw(*shape)
            yield (
                f"{batch} of {m}x{k}x{n} + {list(shape)}",
                (lambda a, b, c: ops.relu(ops.matmul(a, b) * c + c), [a, b, other]),
            )


UPDATES = [(60, 1100, 5), (5, 700, 190), (50, 300, 192), (49, 257, 1), (131, 520, 64)]  # rows, columns, terms


def updates(draw: Draw) -> Iterator[tuple[str, Function]]:
    """Weights updated by gradients of few terms, whose blocks are wide."""
    for m, n, k in UPDATES:
        g, x, w, momentum = draw(k, m), draw(k, n), draw(m, n), draw(m, n)

        def f(g: Any, x: Any, w: Any, momentum: Any) -> Any:
            momentum = 0.9 * momentum + ops.matmul(g, x, transpose_a=True)
            return w - 0.1 * momentum, momentum

        yield f"{m}x{n} of {k}", (f, [g, x, w, momentum])


# image (N, C, H, W), kernel (O, KH, KW), options
CONVOLUTIONS: list[tuple[tuple[int, ...], tuple[int, int, int], dict[str, Any]]] = [
    ((1, 1, 1, 1), (1, 1, 1), {}), ((1, 3, 5, 7), (2, 3, 3), {}), ((7, 1, 9, 6), (5, 2, 4), {"stride": 2}),
    ((9, 4, 7, 7), (6, 3, 3), {"padding": 1}), ((2, 4, 9, 9), (8, 3, 3), {"groups": 2, "padding": 1}),
    ((2, 4, 8, 9), (4, 3, 2), {"groups": 4, "stride": (2, 1)}), ((3, 2, 11, 10), (3, 3, 3), {"dilation": 2}),
    ((2, 3, 12, 13), (17, 5, 5), {"stride": 3, "padding": 2, "dilation": (1, 2)}), ((8, 2, 1, 33), (9, 1, 8), {}),
    ((2, 16, 6, 6), (33, 1, 1), {}), ((3, 2, 4, 4), (2, 4, 4), {}),
    ((1, 5, 3, 3), (4, 3, 3), {"padding": 2, "stride": 4}), ((3, 16, 9, 14), (32, 3, 3), {"padding": 1, "stride": 2}),
    ((2, 32, 7, 6), (16, 1, 1), {"stride": 2}), ((2, 16, 11, 8), (48, 4, 5), {"padding": (0, 3), "stride": (3, 2)}),
    ((3, 1, 28, 28), (16, 3, 3), {"padding": 1, "stride": 2}), ((2, 3, 14, 14), (7, 5, 5), {}),
    ((2, 1, 9, 9), (5, 3, 3), {}), ((2, 1, 9, 5), (5, 3, 3), {"padding": (1, 0)}),  # rows shorter than a vector
]  # fmt: skip


WINOGRAD = [
    (2, 16, 17, 16, 17, 0), (1, 16, 16, 18, 14, 2), (9, 32, 33, 7, 9, 1), (1, 40, 32, 9, 10, 0), (3, 17, 16, 3, 4, 1),
    (1100, 16, 16, 5, 6, 1),  # sums over images in blocks
    (67, 65, 40, 3, 4, 1), (3, 130, 33, 7, 9, 2), (2, 64, 64, 8, 8, 0),  # all images at once
]  # fmt: skip


def winograd_convolutions(draw: Draw) -> Iterator[tuple[str, Function]]:
    """Enough channels for Winograd's method, images that its tiles do not divide."""
    for n, c, o, h, w, padding in WINOGRAD:
        args = [draw(n, c, h, w), draw(o, c, 3, 3)]
        window = Window((1, 1), (padding, padding), (1, 1), 1)
        at_once = value_for(FORWARD_BATCH.suits, *args, window=window, precision="full")
        by_image = value_for(FORWARD_WINOGRAD.items, *args, window=window, precision="full")
        assert (at_once, by_image) == (c >= 64, c < 64)
        yield f"{n}x{c}x{h}x{w} to {o}", (with_gradients(partial(ops.conv2d, padding=padding)), args)


def convolutions(draw: Draw) -> Iterator[tuple[str, Function]]:
    for image, (o, kh, kw), options in CONVOLUTIONS:
        w = draw(o, image[1] // options.get("groups", 1), kh, kw)

        def f(x: Any, w: Any, b: Any, options: Any = options) -> Any:
            return ops.conv2d(x, w, b, **options)

        yield f"conv2d {image} {w.shape} {options}", (with_gradients(f), [draw(*image), w, draw(o)])
    yield "conv2d of no images", (with_gradients(ops.conv2d), [draw(0, 2, 5, 5), draw(3, 2, 3, 3)])
    for n, stride, size in ((1, 1, 4), (9, 2, 5)):
        args = [draw(n, 3, size, size), draw(3, 2, 3, 3), draw(2)]
        transposed = partial(ops.conv_transpose2d, stride=stride, padding=1)
        yield f"conv_transpose2d {n}", (with_gradients(transposed), args)


# images, output channels, kernel, options
CHANNELS_LAST: list[tuple[tuple[int, ...], int, tuple[int, int], dict[str, Any]]] = [
    ((3, 17, 9, 8), 17, (3, 4), {"groups": 17, "padding": (1, 2), "stride": 2}),
    ((2, 9, 3, 5), 9, (3, 3), {"groups": 9, "padding": 1}), ((9, 20, 12, 33), 20, (5, 5), {"groups": 20, "padding": 2}),
    ((2, 33, 7, 6), 33, (4, 3), {"groups": 33, "dilation": (1, 2)}),
    ((2, 10, 6, 7), 10, (1, 2), {"groups": 10, "stride": (3, 1)}),
    ((2, 20, 9, 8), 42, (3, 3), {"padding": 1, "stride": 2}), ((2, 13, 7, 9), 61, (4, 2), {"stride": (1, 3)}),
    ((3, 11, 8, 8), 27, (1, 1), {"stride": 2}), ((2, 9, 7, 7), 18, (3, 3), {"groups": 9, "padding": 1, "stride": 2}),
    ((1, 16, 6, 5), 16, (3, 3), {"groups": 16, "padding": 1, "stride": 3}),
]  # fmt: skip


def channels_last(draw: Draw) -> Iterator[tuple[str, Function]]:
    """Depthwise convolutions, and convolutions with a stride whose channels nearly fill vectors."""
    for image, o, kernel, options in CHANNELS_LAST:
        args = [draw(*image), draw(o, image[1] // options.get("groups", 1), *kernel)]
        yield f"conv2d {image} {o} {kernel} {options}", (with_gradients(partial(ops.conv2d, **options)), args)


POOLS = [  # image, window, stride, padding
    ((1, 1, 1, 1), 1, 1, 0), ((2, 3, 8, 8), 2, 2, 0), ((9, 2, 9, 7), 2, 2, 0), ((1, 5, 9, 9), 3, 2, 1),
    ((3, 1, 6, 17), (2, 3), (1, 2), 0), ((8, 3, 5, 5), 5, 5, 0), ((2, 2, 33, 10), 4, 3, 2),
    ((0, 2, 4, 4), 2, 2, 0), ((7, 9, 4, 34), 2, 2, 0),
]  # fmt: skip


def pools(draw: Draw) -> Iterator[tuple[str, Function]]:
    for image, window, stride, padding in POOLS:
        for pool in (ops.max_pool2d, ops.avg_pool2d):

            def f(x: Any, pool: Any = pool, options: Any = (window, stride, padding)) -> Any:
                return pool(x, *options)

            yield f"{pool.__name__} {image} {window} {stride} {padding}", (with_gradients(f), [draw(*image)])


LENGTHS = (1, 7, 8, 9, 31, 33, 65)


def softmaxes(draw: Draw) -> Iterator[tuple[str, Function]]:
    for n in LENGTHS:
        for shape, axis in [((n,), 0), ((3, n), 1), ((n, 3), 0), ((9, n, 2), 1), ((n, 10), 1), ((2, 2, n), 0)]:
            for f in (ops.softmax, ops.log_softmax, ops.cumsum):
                yield f"{f.__name__} {shape} {axis}", (lambda x, f=f, axis=axis: f(x, axis), [draw(*shape)])
    yield "softmax of nothing", (lambda x: (ops.softmax(x, 1), ops.log_softmax(x, 1)), [draw(0, 3)])


def reductions(draw: Draw) -> Iterator[tuple[str, Function]]:
    for n in (*LENGTHS, 300):
        for shape in [(n,), (n, 9), (10, n), (2, n, 5)]:
            for axes in {(0,), (len(shape) - 1,), tuple(range(len(shape))), tuple({0, len(shape) - 1})}:

                def f(x: Any, axes: Any = axes) -> Any:
                    found = [g(x, axes) for g in (ops.sum, ops.max, ops.min, ops.logsumexp)]
                    return (*found, ops.argmax(x, axes[0])) if len(axes) == 1 else found

                yield f"reductions {shape} {axes}", (f, [draw(*shape)])
    yield "sums of nothing", (lambda x: (ops.sum(x), ops.sum(x, 0), ops.sum(x, 1), ops.exp(x)), [draw(0, 5)])


def groups(draw: Draw) -> Iterator[tuple[str, Function]]:
    """What fuse_batchwise makes one equation of, with sums over the items; some of fewer items than it takes."""
    for n, classes in product((1, 7, 8, 9, 17, 40), (1, 3, 10)):
        labels = np.arange(n) % classes

        def loss(x: Any, w: Any, b: Any, labels: Any) -> Any:
            with ad.core.trace.scope("loss"):
                return ops.cross_entropy(ops.matmul(x, w) + b, labels)

        def gradients(x: Any, w: Any, b: Any, labels: Any) -> Any:
            return ad.value_and_grad(loss, (0, 1, 2))(x, w, b, labels)

        yield f"loss {n} {classes}", (gradients, [draw(n, 5), draw(5, classes), draw(classes), labels])
    for n in (1, 8, 9, 33):

        def network(x: Any, w: Any, b: Any, v: Any) -> Any:
            h = ops.max_pool2d(ops.relu(ops.conv2d(x, w, b)), 2)
            return ops.sum(ops.square(ops.relu(ops.conv2d(h, v, padding=1))))

        def of_network(*args: Any) -> Any:
            return ad.value_and_grad(network, (0, 1, 2, 3))(*args)

        yield f"network {n}", (of_network, [draw(n, 2, 8, 8), draw(3, 2, 3, 3), draw(3), draw(4, 3, 3, 3)])
    rows, columns = np.arange(8) * 3 % 8, draw(8)
    yield "whole and by item", (lambda x, i: ops.embedding(i, x) * 2.0 + x, [draw(8, 3), rows])
    yield "a row and by item", (lambda x, y: ops.sum(ops.softmax(x + y, 1), 1) * y, [draw(8, 8), columns])
    yield "image and kernel", (lambda x: ops.conv2d(x, x, padding=1), [draw(8, 8, 3, 3)])
    yield "reshaped result", (lambda x: (y := ops.softmax(x, 1), ops.reshape(y, (9, 2, 3)), y * 2.0), [draw(9, 6)])


def rows(draw: Draw) -> Iterator[tuple[str, Function]]:
    """Products of many rows with small matrices, between equations on the same rows; the last step may be shorter."""
    count = 1024
    for extra, k, n in [(0, 20, 20), (1, 1, 3), (7, 9, 1), (31, 5, 4), (40, 33, 17), (77, 16, 31), (1, 3, 48)]:

        def network(x: Any, w: Any, b: Any, v: Any) -> Any:
            return ops.sum(ops.square(ops.tanh(x @ w + b) @ v)) / count

        def gradients(*args: Any) -> Any:
            return ad.value_and_grad(network, (0, 1, 2, 3))(*args)

        yield f"{k}x{n} +{extra}", (gradients, [draw(count + extra, k), draw(k, n), draw(n), draw(n, 2)])

    for m, k, n in [(4, 4, 4), (2, 3, 1), (1, 4, 9), (3, 1, 7), (8, 5, 5), (9, 2, 17), (4, 9, 2), (3, 3, 3), (5, 2, 6)]:

        def filtered(a: Any, b: Any) -> Any:
            return ops.tanh(ops.transpose(b, (0, 2, 1)) @ ops.transpose(ops.tanh(a), (0, 2, 1)))

        yield f"matrices {m}x{k}x{n}", (with_gradients(filtered), [draw(259, m, k), draw(259, k, n)])

    def sequences(x: Any, w: Any, b: Any) -> Any:  # rows of sequences, then whole sequences
        return ops.mean(ops.softmax(ops.tanh(x @ w) + b, 1), 1)

    yield "sequences", (with_gradients(sequences), [draw(70, 16, 5), draw(5, 6), draw(16, 6)])

    def slopes(x: Any, w: Any, v: Any) -> Any:
        slope = ad.grad(lambda x: ops.sum(ops.tanh(x @ w) @ v))
        return ops.mean(ops.square(ops.sum(ad.grad(lambda x: ops.sum(ops.sin(slope(x))))(x), 1)))

    arguments = [draw(count + 3, 2), draw(2, 9), draw(9, 1)]
    yield "second derivatives", (lambda *xs: ad.value_and_grad(slopes, (1, 2))(*xs), arguments)

    def gathered(w: Any, x: Any, i: Any) -> Any:
        return ops.sum(ops.square(ops.tanh(ops.embedding(i, x) @ w))) / count

    indices = np.arange(count + 5) * 7 % 40
    yield "gathered rows", (lambda *xs: ad.value_and_grad(gathered)(*xs), [draw(3, 5), draw(40, 3), indices])


def elementwise(draw: Draw) -> Iterator[tuple[str, Function]]:
    shapes = [((), (3,)), ((1,), (1, 1)), ((9,), (65, 9)), ((65, 1), (65, 9)), ((4, 1, 6), (5, 6)), ((0, 3), (3,)),
              ((2, 1, 3, 1), (4, 1, 5)), ((1, 4100), (1,)), ((33, 130), (130,))]  # fmt: skip
    for a, b in shapes:

        def f(x: Any, y: Any) -> Any:
            z = ops.tanh(x) * y + 1.0
            return z, ops.exp(z) - x, ops.less(x, y)

        yield f"{a} and {b}", (f, [draw(*a), draw(*b)])
    parts = [draw(2, 1, 3), draw(2, 0, 3), draw(2, 7, 3)]
    yield "concatenate", (lambda *xs: ops.concatenate(xs, 1), parts)
    yield "transpose", (lambda x: (ops.transpose(x), ops.flip(x, 1), x[1::2, :-1]), [draw(9, 33)])


def copies(draw: Draw) -> Iterator[tuple[str, Function]]:
    """Transposes by vectors: lines shorter than one, lines that vectors and cache lines do not divide, all types."""
    for n, m in product((1, 3, 8, 17, 65), (1, 7, 16, 33)):

        def f(*xs: Any) -> Any:
            return [ops.transpose(x) for x in xs]

        kinds = [(draw(n, m) * 100).astype(kind) for kind in (draw.dtype, "int32", "int64", "uint8", bool)]
        yield f"{n}x{m}", (f, kinds)
        axes = [(0, 2, 1), (2, 0, 1), (2, 1, 0)]
        yield f"9x{n}x{m}", (lambda x, axes=axes: [ops.transpose(x, a) for a in axes], [draw(9, n, m)])
    yield "backwards", (lambda x: ops.transpose(ops.flip(x, 0))[:, 1::2], [draw(33, 18)])


def masks(draw: Draw) -> Iterator[tuple[str, Function]]:
    """Arrays of bool, read and written by loops, whole and by item."""
    for n in LENGTHS:
        shape = (9, n)
        marked = draw(*shape) > 0

        def f(mask: Any, x: Any) -> Any:
            numbers = ops.astype(mask, x.dtype)
            chosen = ops.where(mask, x, 2.0 * x)
            return numbers, chosen, ops.sum(numbers, 0), ops.sum(numbers, 1), ops.equal(mask, mask[:1]), x + numbers

        yield f"{shape}", (f, [marked, draw(*shape)])
        yield f"largest of {shape}", (with_gradients(lambda x: ops.max(x, 0)), [draw(*shape)])


def specials(draw: Draw) -> Iterator[tuple[str, Function]]:
    """Infinities, NaN, both zeros and numbers at the ends of the range, beside one another in every way."""
    end = np.finfo(draw.dtype).max
    values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -2.5, end, -end, 1 / end, 30.0, -30.0], draw.dtype)
    a, b = (np.ascontiguousarray(x) for x in np.broadcast_arrays(values[:, None], values))
    unary = [
        ops.neg, ops.abs, ops.sign, ops.exp, ops.log, ops.log1p, ops.expm1, ops.sqrt, ops.square, ops.tanh, ops.sigmoid,
        ops.softplus, ops.erf, ops.relu, ops.silu, ops.elu, ops.leaky_relu, ops.reciprocal,
    ]  # fmt: skip
    for f in unary:
        yield f.__name__, (f, [values])
    binary = [
        ops.add, ops.sub, ops.mul, ops.div, ops.maximum, ops.minimum, ops.less, ops.less_equal, ops.equal,
        ops.not_equal, ops.greater, ops.greater_equal, ops.power,
    ]  # fmt: skip
    for g in binary:
        yield g.__name__, (g, [a, b])
    yield "clip", (lambda x: (ops.clip(x, -1.0, 2.0), ops.clip(x, min=0.0)), [values])
    yield "where", (lambda x, y: ops.where(ops.less(x, y), x, y), [a, b])
    yield "signs of zero", (lambda x: 1.0 / x, [values[3:5]])
    summed = values[np.abs(values) != end]  # without those of which the order of a sum decides what is left
    for axis in (0, 1):
        for r in (ops.sum, ops.max, ops.min, ops.logsumexp, ops.argmax, ops.softmax, ops.log_softmax, ops.cumsum):
            rows = np.stack([np.roll(summed, i)[:5] for i in range(10)])
            yield f"{r.__name__} {axis}", (lambda x, r=r, axis=axis: r(x, axis), [rows if axis else rows.T.copy()])
    image = np.stack([np.resize(np.roll(values, i), (2, 6, 6)) for i in range(9)])
    yield "pools", (lambda x: (ops.max_pool2d(x, 2), ops.max_pool2d(x, 3, 2, 1), ops.avg_pool2d(x, 2)), [image])
    yield "product", (ops.matmul, [a, b])


def integers(draw: Draw) -> Iterator[tuple[str, Function]]:
    """They wrap around, and are counted, compared and converted."""
    for name in ("int32", "int64", "uint8", "uint32"):
        info = np.iinfo(name)
        x = np.array([0, 1, 2, 7, info.max, info.max - 1, info.min, 3, 100], name)
        y = np.array([3, info.max, 5, info.min, 1, 2, info.max, 9, 3], name)
        for f in (ops.add, ops.sub, ops.mul, ops.maximum, ops.less, ops.equal):
            yield f"{f.__name__} {name}", (f, [x, y])
        yield f"sums {name}", (lambda x: (ops.sum(x), ops.cumsum(x), ops.max(x), ops.argmax(x)), [x[:4]])
        yield f"to {draw.dtype} {name}", (lambda x: (ops.astype(x, draw.dtype) / 7.0, ops.astype(x, bool)), [x])
        rows = np.arange(36).reshape(9, 4).astype(name)
        yield f"rows {name}", (lambda x, i: ops.astype(ops.embedding(i, x), draw.dtype) * 0.5, [rows, np.arange(9) % 5])
        yield f"by {name}", (lambda x, i: ops.embedding(i, x), [draw(5, 3), np.array([4, 0, 1], name)])
    yield "from bool", (lambda x: (ops.astype(ops.less(x, 0.0), "int32"), ops.sum(ops.less(x, 0.0))), [draw(9, 5)])
    yield "to integers", (lambda x: ops.astype(x * 100.0, "int32"), [draw(33)])


def pooled(draw: Draw) -> Iterator[tuple[str, Function]]:
    """Gradients of a convolution behind a pooling, most of them by kernels that visit live windows only."""
    for n, c, o, size, kernel, padding, window, stride in [
        (1, 1, 1, 6, 4, 0, 2, 2), (9, 3, 5, 9, 3, 1, 2, 2), (8, 2, 33, 11, 5, 0, 3, 2), (7, 16, 3, 8, 1, 0, 2, 2),
        (2, 8, 8, 12, 3, 1, 2, 1), (3, 4, 17, 7, 3, 0, 5, 5), (8, 5, 2, (5, 34), 3, 1, (1, 2), (1, 2)),
    ]:  # fmt: skip
        image = (n, c, *(size if isinstance(size, tuple) else (size, size)))

        def f(x: Any, w: Any, b: Any, padding: Any = padding, window: Any = window, stride: Any = stride) -> Any:
            return ops.max_pool2d(ops.relu(ops.conv2d(x, w, b, padding=padding)), window, stride)

        yield f"{image} {o} {window} {stride}", (with_gradients(f), [draw(*image), draw(o, c, kernel, kernel), draw(o)])


def sliced(draw: Draw) -> Iterator[tuple[str, Function]]:
    """Equations on long items, which are computed slice by slice: values, numbers and sums by item, slice and both."""

    def excitation(x: Any, w: Any) -> Any:
        y = x * ops.reshape(ops.sigmoid(ops.mean(x, (2, 3)) @ w), (*x.shape[:2], 1, 1))
        return ops.mean(y * y)

    def batch_norm(x: Any, gain: Any, bias: Any) -> Any:
        centred = x - ops.mean(x, (0, 2, 3), keepdims=True)
        scale = gain / ops.sqrt(ops.mean(centred * centred, (0, 2, 3), keepdims=True) + 1e-5)
        return ops.relu(centred * scale + bias) - x

    def by_item(x: Any, a: Any, b: Any) -> Any:
        y = ops.tanh(x * a) * b
        return ops.softmax(y, -1), ops.sum(y * y, 0), ops.max(y, (2, 3)), ops.sum(ops.exp(y)), ops.sum(y, (0, 1))

    for n, c, h, w in [(8, 6, 31, 30), (9, 7, 33, 32), (11, 4, 1, 700), (70, 3, 40, 40)]:
        x, gain = draw(n, c, h, w), draw(1, c, 1, 1)
        yield f"{x.shape} excitation", (with_gradients(excitation), [x, draw(c, c)])
        yield f"{x.shape} batch norm", (with_gradients(batch_norm), [x, gain, draw(1, c, 1, 1)])
        yield f"{x.shape} by item", (by_item, [x, draw(n, 1, 1, 1), draw(c, 1, w)])


FAMILIES = [
    products, epilogues, updates, convolutions, winograd_convolutions, channels_last, pools, softmaxes, reductions,
    groups, rows, elementwise, copies, masks, specials, integers, pooled, sliced,
]  # fmt: skip


PLAIN = (0,)
"""The functions that plain pytest compiles: of five that follow one another, these."""


@pytest.mark.parametrize(
    ("dtype", "taken", "code"),
    [
        pytest.param("float32", PLAIN, "quick_compiler", id="float32"),
        pytest.param("float32", (2, 4), "optimised", id="float32, optimised", marks=pytest.mark.exhaustive),
        pytest.param("float64", (1, 3), "quick_compiler", id="float64", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_results_of_odd_sizes_equal_eager_ones(
    family: Any,
    dtype: str,
    taken: tuple[int, ...],
    code: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request.getfixturevalue(code)
    monkeypatch.setattr(loops, "FEW_ELEMENTS", 16)  # so that small arrays, too, are divided among the threads
    functions = list(family(Draw(dtype)))
    assert len(dict(functions)) == len(functions)
    # The source is one for both types: some sizes are enough for the second.
    chosen = dict(function for i, function in enumerate(functions) if i % 5 in taken)
    check_all(chosen, 10 * TOLERANCE[dtype], largest=family is not specials)


@pytest.mark.usefixtures("optimised")
def test_a_product_with_a_vector_has_the_bits_of_that_column_in_a_wider_product() -> None:
    draw = Draw("float32")
    sizes = [(1, 5), (7, 16), (16, 33), (33, 129), (47, 300), (64, 128)]
    pairs = [
        (flipped, draw(k, m) if flipped else draw(m, k), draw(k, 5)) for m, k in sizes for flipped in (False, True)
    ]
    multiply = ad.jit(lambda pairs: [ops.matmul(a, b, flipped) for flipped, a, b in pairs])
    vectors = multiply([(flipped, a, b[:, :1].copy()) for flipped, a, b in pairs])
    for vector, columns in zip(vectors, multiply(pairs), strict=True):
        np.testing.assert_array_equal(vector.numpy(), columns.numpy()[:, :1], strict=True)


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("shapes", [((1024, 8), (8, 8)), ((256, 4, 8), (256, 8, 4))])
def test_products_in_a_precision_without_c_functions_run_on_numpy(
    shapes: tuple[tuple[int, ...], ...],
) -> None:
    arrays = [Draw("float32")(*shape) for shape in shapes]
    with ops.matmul_precision("tf32"):
        found = ad.jit(lambda a, b: ops.relu(a @ b))(*arrays)
    np.testing.assert_allclose(found.numpy(), np.maximum(arrays[0] @ arrays[1], 0), rtol=1e-2, atol=1e-2)
