"""The Programs that the golden dumps are made of, written with public operations only."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import adtrain as ad
from adtrain import config, ops
from adtrain.cases import CASES, Case
from adtrain.core import tree
from adtrain.core.array import Value
from adtrain.core.program import Program
from adtrain.core.staging import stage
from adtrain.training.preparation import outline
from adtrain.training.step import evaluation_step, zero_totals

CONFIGS = ("cnn", "lenet5", "lenet5-augmented", "mlp", "mlp-small", "resnet", "smoke")
BATCHES = (128, 1024)
ROUNDED = ("cnn", "mlp")
"""Configs whose steps are staged in tf32 and bfloat16, too."""
TARGETS = {(7, 5): 40, (8, 0): 108, (8, 6): 84, (8, 9): 128, (9, 0): 132, (10, 0): 148, (12, 0): 170}
"""Multiprocessors by compute capability."""


class Placeholder(Value):
    """An argument of which a Program needs the type only."""

    __slots__ = ("device", "dtype", "shape")

    def __init__(self, shape: Sequence[int], dtype: Any = "float32") -> None:
        self.shape, self.dtype, self.device = tuple(shape), np.dtype(dtype), "cpu"


def steps() -> Iterator[tuple[str, Callable[[], Program]]]:
    """Name and traced Program of the training steps, and of evaluations."""
    for batch in BATCHES:
        for name in CONFIGS:
            for precision in ("float32", *(("tf32", "bfloat16") if name in ROUNDED else ())):
                yield f"{name}, batch {batch}, {precision}", partial(step, name, batch, precision)
    for name in CONFIGS:
        yield f"{name}, evaluation", partial(evaluation, name)


def step(name: str, batch: int, precision: str = "float32") -> Program:
    overrides = [f"data.batch_size={batch}", f"training.precision={precision}"]
    return outline(config.load(name, overrides)).step_program(passes=())


def evaluation(name: str) -> Program:
    experiment = outline(config.load(name, ["data.batch_size=128"]))
    state, images = experiment.random_initial_state("cpu"), experiment.train.images
    order = Placeholder((8, 128), "int64")
    arguments = (
        zero_totals(experiment.network.task, "cpu"),
        state.params,
        state.statistics,
        images,
        experiment.train.labels,
        order,
    )
    typed = tree.map(lambda x: Placeholder(x.shape, x.dtype), arguments)
    return stage(evaluation_step(experiment.network), (), donate=(0,)).program(*typed)


def cases() -> Iterator[tuple[str, Callable[[], Program]]]:
    """Name and traced Program of each case with its gradients."""
    for case in CASES:
        for dtype in ("float32", "float64"):
            yield f"{case.op}, {case.name}, {dtype}", partial(traced_case, case, dtype)


def traced_case(case: Case, dtype: str) -> Program:
    return traced(case.f, case.sample(dtype), differentiate=case.order > 0)


def traced(f: Callable[..., Any], inputs: Sequence[Value], differentiate: bool = True) -> Program:
    """The outputs of f, and the pullback of ones to each of its floating-point inputs."""
    smooth = [i for i, x in enumerate(inputs) if x.dtype.kind == "f"]

    def both(*xs: Value) -> tuple[Value, ...]:
        def of_smooth(*given: Value) -> Any:
            replaced = dict(zip(smooth, given, strict=True))
            return f(*(replaced.get(i, x) for i, x in enumerate(xs)))

        if not differentiate or not smooth:
            return tuple(tree.flatten(f(*xs))[0])
        out, pullback = ad.vjp(of_smooth, *(xs[i] for i in smooth))
        return (*tree.flatten(out)[0], *tree.flatten(pullback(tree.map(ops.ones_like, out)))[0])

    return stage(both).program(*inputs)


def random_operations() -> Iterator[tuple[str, Callable[[], Program]]]:
    """Name and traced Program of single operations of random shapes with their gradients."""
    for kind, count in RANDOM.items():
        for i in range(count):
            yield f"{kind.__name__} {i}", partial(kind, random.Random(f"{kind.__name__} {i}"))
    for name, (f, inputs) in LARGE.items():
        yield name, partial(traced, f, inputs)


def matmul(draw: random.Random) -> Program:
    m, n, k = (_length(draw, 4096) for _ in range(3))
    batch = () if draw.random() < 0.7 else (_length(draw, 64),)
    a, b = draw.random() < 0.5, draw.random() < 0.5
    dtype, precision = _numbers(draw)
    left, right = (*batch, *((k, m) if a else (m, k))), (*batch, *((n, k) if b else (k, n)))
    f = ops.matmul_precision(precision)(lambda x, y: ops.matmul(x, y, a, b))
    return traced(f, [Placeholder(left, dtype), Placeholder(right, dtype)])


def large_matmul(draw: random.Random) -> Program:
    m, n, k = (draw.choice([64, 256, 512, 1000, 1024, 1536, 2048, 4096, 8192]) for _ in range(3))
    batch = draw.choice([(), (), (4,)])
    a, b = draw.random() < 0.5, draw.random() < 0.5
    left, right = (*batch, *((k, m) if a else (m, k))), (*batch, *((n, k) if b else (k, n)))
    f = ops.matmul_precision(draw.choice(["full", "full", "tf32", "bfloat16"]))(lambda x, y: ops.matmul(x, y, a, b))
    return traced(f, [Placeholder(left), Placeholder(right)])


def conv2d(draw: random.Random) -> Program:
    images, channels, outputs = _length(draw, 512), _length(draw, 256), _length(draw, 256)
    kernel = draw.choice([(1, 1), (3, 3), (3, 3), (3, 3), (5, 5), (2, 2), (7, 7), (3, 2)])
    strides: list[Any] = [1, 1, 1, 2, (1, 2), 3]
    paddings: list[Any] = [0, 0, 1, 1, 2, (0, 1)]
    stride, padding = draw.choice(strides), draw.choice(paddings)
    dilation = draw.choice([1, 1, 1, 1, 2])
    groups = draw.choice([1, 1, 1, 1, 2, 4])
    if draw.random() < 0.1:  # depthwise
        groups = channels
    channels, outputs = -(-channels // groups) * groups, -(-outputs // groups) * groups
    size = [max(_length(draw, 64), dilation * (k - 1) + 1) for k in kernel]
    dtype, precision = _numbers(draw)
    f = ops.matmul_precision(precision)(
        lambda x, w: ops.conv2d(x, w, stride=stride, padding=padding, dilation=dilation, groups=groups)
    )
    weight = Placeholder((outputs, channels // groups, *kernel), dtype)
    return traced(f, [Placeholder((images, channels, *size), dtype), weight])


def plain_conv2d(draw: random.Random) -> Program:
    """Convolutions as networks have them, with bias, relu and pooling, for the passes."""
    images, channels = draw.choice([16, 64, 128, 256, 1024]), draw.choice([1, 3, 8, 16, 32, 64, 128, 256])
    outputs, size = draw.choice([8, 16, 32, 64, 128, 256]), draw.choice([8, 14, 16, 28, 32, 56])
    kernel, padding = draw.choice([(3, 0), (3, 1), (5, 0), (5, 2), (1, 0)])
    pools, precision = draw.random() < 0.5, draw.choice(["full", "full", "full", "tf32", "bfloat16"])

    def f(x: Value, w: Value, b: Value) -> Value:
        y = ops.relu(ops.conv2d(x, w, b, padding=padding))
        return ops.max_pool2d(y, 2) if pools else y

    shapes = (images, channels, size, size), (outputs, channels, kernel, kernel), (outputs,)
    return traced(ops.matmul_precision(precision)(f), [Placeholder(s) for s in shapes])


def softmax(draw: random.Random) -> Program:
    x, axis = _array(draw), draw.choice([-1, -1, 0])
    f = draw.choice([ops.softmax, ops.log_softmax, ops.logsumexp])
    return traced(lambda x: f(x, axis), [x])


def reduction(draw: random.Random) -> Program:
    x = _array(draw)
    axes = tuple(sorted(draw.sample(range(x.ndim), draw.randint(1, x.ndim))))
    f = draw.choice([ops.sum, ops.sum, ops.mean, ops.max, ops.min, ops.var])
    return traced(lambda x: f(x, axes), [x])


def argmax(draw: random.Random) -> Program:
    return traced(lambda x: ops.argmax(x, draw.choice([0, -1])), [_array(draw)], differentiate=False)


def norm(draw: random.Random) -> Program:
    x = _array(draw, most_axes=4)
    if draw.random() < 0.5 or x.ndim < 2:
        return traced(lambda x, w, b: ops.layer_norm(x, x.shape[-1:], w, b), [x, *[_like(x, x.shape[-1:])] * 2])
    statistics = [_like(x, (x.shape[1],)) for _ in range(4)]
    return traced(lambda x, m, v, w, b: ops.batch_norm(x, m, v, w, b, training=True), [x, *statistics])


def cumsum(draw: random.Random) -> Program:
    axis, backwards = draw.choice([0, -1]), draw.random() < 0.5
    return traced(lambda x: ops.cumsum(x, axis, reverse=backwards), [_array(draw)])


def take(draw: random.Random) -> Program:
    x, axis = _array(draw), draw.choice([0, 0, -1])
    indices = Placeholder((_length(draw, 4096),), draw.choice(["int64", "int32"]))
    return traced(lambda x, i: ops.take(x, i, axis), [x, indices])


def take_along_axis(draw: random.Random) -> Program:
    x, axis = _array(draw), draw.choice([0, -1])
    shape = list(x.shape)
    shape[axis] = _length(draw, 64)
    return traced(lambda x, i: ops.take_along_axis(x, i, axis), [x, Placeholder(shape, "int64")])


def pooling(draw: random.Random) -> Program:
    kernels: list[Any] = [2, 2, 3, (3, 2)]
    kernel = draw.choice(kernels)
    stride, padding = draw.choice([None, None, 1, 2]), draw.choice([0, 0, 1])
    f = draw.choice([ops.max_pool2d, ops.avg_pool2d])
    shape = _length(draw, 512), _length(draw, 128), *(max(3, _length(draw, 64)) for _ in range(2))
    return traced(lambda x: f(x, kernel, stride, padding), [Placeholder(shape, _numbers(draw)[0])])


def copies(draw: random.Random) -> Program:
    x = _array(draw)
    axes = tuple(draw.sample(range(x.ndim), x.ndim))
    pads = [(draw.randint(0, 3), draw.randint(0, 3)) for _ in x.shape]
    f = draw.choice([
        lambda x: ops.transpose(x, axes),
        lambda x: ops.pad(x, pads),
        lambda x: ops.flip(x, axes[0]),
        lambda x: ops.concatenate([x, x], axes[0]),
        lambda x: ops.broadcast_to(x, (3, *x.shape)),
    ])  # fmt: skip
    return traced(f, [x])


RANDOM: dict[Callable[[random.Random], Program], int] = {
    matmul: 90, large_matmul: 30, conv2d: 90, plain_conv2d: 40, softmax: 30, reduction: 40, argmax: 10, norm: 30,
    cumsum: 15, take: 20, take_along_axis: 15, pooling: 20, copies: 25,
}  # fmt: skip


def _pooled_gradient(x: Value) -> Value:
    return ad.grad(lambda x: ops.sum(ops.square(ops.max_pool2d(x, 2))))(x)


LARGE: dict[str, tuple[Callable[..., Any], list[Value]]] = {
    "transpose": (ops.transpose, [Placeholder((1024, 3000))]),
    "transpose of many": (lambda x: ops.transpose(x, (0, 2, 1)), [Placeholder((64, 128, 256))]),
    "images, channels last": (lambda x: ops.transpose(x, (0, 2, 3, 1)), [Placeholder((128, 64, 28, 28))]),
    "cumsum of few rows": (lambda x: ops.cumsum(x, 1), [Placeholder((4, 1 << 20))]),
    "cumsum of few columns": (lambda x: ops.cumsum(x, 0), [Placeholder((1 << 20, 4))]),
    "softmax of many rows": (ops.softmax, [Placeholder((100_000, 10))]),
    "log_softmax of many rows": (ops.log_softmax, [Placeholder((100_000, 10))]),
    "softmax of long columns": (lambda x: ops.softmax(x, 0), [Placeholder((50_000, 64))]),
    "sum of everything": (ops.sum, [Placeholder((1 << 24,))]),
    "gradient of a gradient of max_pool2d": (_pooled_gradient, [Placeholder((64, 8, 28, 28))]),
    **{
        f"embedding of {length}": (ops.embedding, [Placeholder((16384,), "int64"), Placeholder((length, 96))])
        for length in (200, 40_000, 10_000_000)
    },
}


def _length(draw: random.Random, most: int) -> int:
    """Many small numbers, many powers of two and multiples of 8."""
    found = round(most ** draw.random())
    kind = draw.random()
    if kind < 0.3:
        return 1 << (found.bit_length() - 1)
    return max(found // 8 * 8, 1) if kind < 0.5 else found


def _numbers(draw: random.Random) -> tuple[str, str]:
    """A type and a precision."""
    return draw.choice([("float32", "full")] * 6 + [("float64", "full"), ("float32", "tf32"), ("float32", "bfloat16")])


def _array(draw: random.Random, most_axes: int = 3) -> Placeholder:
    shape = [_length(draw, 1 << draw.choice([4, 8, 12])) for _ in range(draw.randint(1, most_axes))]
    return Placeholder(shape, draw.choice(["float32", "float32", "float32", "float64"]))


def _like(x: Value, shape: Sequence[int]) -> Placeholder:
    return Placeholder(shape, x.dtype)
