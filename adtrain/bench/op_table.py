"""The table of operations that `adtrain bench` times, each at several sizes n.

Which results are right is the subject of another table, `adtrain/cases`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from adtrain import ops
from adtrain.backends.cpu import naive as loops
from adtrain.core.precision import FULL, PRECISIONS
from adtrain.nn.module import size_text
from adtrain.ops.hash_grid import grid_levels
from adtrain.samplers import Sampler, between, integers, normal

T = TypeVar("T")

Sizes = Mapping[str, Sequence[int]]
"""From the device to ascending sizes: the first limited by launch overhead, the last by memory or arithmetic."""

Inputs = Callable[[int], tuple[Sampler, ...]]
"""From a size to functions that draw the inputs."""

ELEMENTS: Sizes = {"cpu": (2**10, 2**14, 2**18, 2**22), "gpu": (2**12, 2**16, 2**20, 2**24)}
SIDE: Sizes = {"cpu": (64, 256, 1024), "gpu": (64, 256, 1024, 4096)}
"""Rows and columns of a square matrix."""
ROWS: Sizes = {"cpu": (32, 256, 2048), "gpu": (32, 256, 2048, 16384)}
IMAGES: Sizes = {"cpu": (8, 32, 128), "gpu": (8, 32, 128, 512)}
TOKENS: Sizes = {"cpu": (16, 128, 512), "gpu": (16, 256, 2048, 8192)}
POINTS: Sizes = {"cpu": (2**8, 2**12, 2**16), "gpu": (2**10, 2**14, 2**18)}
SEQUENCES: Sizes = {"cpu": (8, 32, 128), "gpu": (8, 32, 128, 1024)}


N = -1
"""Stands for n in a shape."""


@dataclass(frozen=True)
class Peers:
    """How an operation is timed against other systems.

    Attributes:
        sizes: the sizes; a device may be missing.
        name: the size in words, with "{n}", or "{power}" for a power of two; unique for the operation.
        output: the shape of the output, with N for n.
        by_item: positions of the inputs whose item n (on axis 0) affects only item n of the output; empty where items
            of the output depend on several items.
        backward: whether its gradient is compared; False where a peer's gradient is a view that moves no data.
        precisions: whether it is timed in each precision on a GPU.
    """

    sizes: Sizes
    name: str
    output: tuple[int, ...]
    by_item: tuple[int, ...] = ()
    backward: bool = True
    precisions: bool = False


@dataclass(frozen=True)
class Naive:
    """How an operation is timed on several devices and by a naive loop, in float32.

    Attributes:
        what: the problem in words, in terms of n.
        loop: from the inputs to the output, by a naive loop.
        work: from n to the number of FLOPs, or of elements if the operation only moves them.
        sizes: the sizes, ascending.
    """

    what: str
    loop: Callable[..., np.ndarray]
    work: Callable[[int], float]
    sizes: Sequence[int]


@dataclass(frozen=True)
class TimedOp:
    """An operation of the table, at any size n.

    Attributes:
        op: name of the public function in `adtrain.ops`.
        variant: other options, such as the axis; ``op`` and ``variant`` together are unique.
        sizes: of `bench ops`; empty for a row that other commands time.
        inputs: from n to functions that draw the inputs; each floating-point input is differentiated by itself.
        f: the operation as a function of the inputs; its parameters' names name the gradients.
        differentiable: whether there is a backward phase to time.
        options: keyword arguments of the operation in all systems.
        peers: how `bench against` times it; None if it does not.
        naive: how `bench devices` times it; None if it does not.
    """

    op: str
    variant: str
    sizes: Sizes
    inputs: Inputs
    f: Callable[..., Any]
    differentiable: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    peers: Peers | None = None
    naive: Naive | None = None

    def arrays(self, n: int) -> list[np.ndarray]:
        """The inputs; the same at every call."""
        rng = np.random.default_rng(zlib.crc32(f"{self.op}/{self.variant}/{n}".encode()))
        return [make(rng) for make in self.inputs(n)]

    def cases(self, device: str) -> Iterator[OpCase]:
        """The operation at the sizes at which it is timed against other systems."""
        if (about := self.peers) is None:
            return
        for precision in PRECISIONS if about.precisions and device == "gpu" else (FULL,):
            for n in about.sizes.get(device, ()):
                name = about.name.format(n=n, power=n.bit_length() - 1)
                name = name if precision == FULL else f"{name} {precision}"
                given = self.inputs(n), _at(about.output, n), self.options, about.by_item
                yield OpCase(self.op, name, *given, precision, about.backward)


@dataclass(frozen=True)
class OpCase:
    """An operation at one size, for all systems. Every system maps its name to a function with the same options.

    Attributes:
        inputs: functions that draw the inputs; floating-point ones become float32, and are differentiated.
        output, options, by_item: as in `Peers` and `TimedOp`.
        precision: the argument of `ops.matmul_precision`.
        differentiable: whether its gradient is compared.
    """

    op: str
    size: str
    inputs: tuple[Sampler, ...]
    output: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    by_item: tuple[int, ...] = ()
    precision: str = FULL
    differentiable: bool = True

    @property
    def name(self) -> str:
        return f"{self.op} {self.size}"

    @property
    def phases(self) -> Sequence[str]:
        return ("forward", "backward") if self.differentiable else ("forward",)

    def flops(self, phase: str) -> int | None:
        """Two for each multiply-add of a matrix product or convolution, or of its two gradients; None for other
        operations. Attention has two products, and its gradient five."""
        if self.op == "attention":
            queries, keys = (_shaped(make).shape for make in self.inputs[:2])
            return 2 * math.prod(queries) * keys[-2] * (5 if phase == "backward" else 2)
        if self.op not in ("matmul", "conv2d"):
            return None
        image, weight = (_shaped(make).shape for make in self.inputs)
        inside = image[-1] if self.op == "matmul" else math.prod(weight[1:])
        return 2 * math.prod(self.output) * inside * (2 if phase == "backward" else 1)

    def of(self, functions: Any) -> Callable[..., Any]:
        """The operation with its options, from a module or mapping of functions by name."""
        f = functions[self.op] if isinstance(functions, Mapping) else getattr(functions, self.op)
        return lambda *args: f(*args, **self.options)

    def arrays(self) -> list[np.ndarray]:
        """The inputs; the same in every process."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        drawn = [make(rng) for make in self.inputs]
        return [x.astype(np.float32) if x.dtype.kind == "f" else x for x in drawn]

    def cotangent(self) -> np.ndarray:
        """A random cotangent of the output, float32."""
        return np.random.default_rng(0).standard_normal(self.output, np.float32)

    def floats(self, args: Sequence[T]) -> list[T]:
        """The inputs that are differentiated."""
        return [x for x, make in zip(args, self.inputs, strict=True) if _is_float(make)]

    def with_indices(self, args: Sequence[T], floats: Sequence[T]) -> list[T]:
        """The inputs, with `floats` in place of those that are differentiated."""
        given = iter(floats)
        return [next(given) if _is_float(make) else x for x, make in zip(args, self.inputs, strict=True)]


class _ZeroGenerator:
    """Stands in for a random generator to find the shape and dtype that a sampler draws, without using memory."""

    def normal(self, size: tuple[int, ...]) -> np.ndarray:
        return np.broadcast_to(np.float64(0), size)

    def integers(self, low: int, high: int, size: tuple[int, ...]) -> np.ndarray:
        return np.broadcast_to(np.int64(0), size)


def _shaped(make: Sampler) -> np.ndarray:
    return make(_ZeroGenerator())  # type: ignore[arg-type]


def _is_float(make: Sampler) -> bool:
    return _shaped(make).dtype.kind == "f"


TABLE: list[TimedOp] = []

VIEWS = ("reshape", "squeeze", "expand_dims", "broadcast_to", "stop_gradient", "tile", "repeat", "getitem", "slice")
"""Operations without a row: they are views, `broadcast_to` and `reshape` together, or `slice` under another name."""


def bench(
    names: str,
    sizes: Sizes,
    inputs: Inputs,
    f: Callable[..., Any] | None = None,
    variant: str = "",
    differentiable: bool = True,
    peers: Peers | None = None,
    naive: Naive | None = None,
    **options: Any,
) -> None:
    """A row that `bench ops` times, for each of the names with spaces between them."""
    for op in names.split():
        given = f or (partial(getattr(ops, op), **options) if options else getattr(ops, op))
        TABLE.append(TimedOp(op, variant, sizes, inputs, given, differentiable, options, peers, naive))


def against(names: str, variant: str, inputs: Inputs, peers: Peers, **options: Any) -> None:
    """A row that `bench against` alone times, for each of the names."""
    bench(names, {}, inputs, variant=variant, peers=peers, **options)


def cases(device: str) -> list[OpCase]:
    """What `bench against` times: sizes of a training step on a CPU, large enough to fill a GPU."""
    return [case for row in TABLE for case in row.cases(device)]


def normals(*shapes: tuple[int, ...]) -> Inputs:
    """Arrays of these shapes, with N for n."""
    return lambda n: tuple(normal(*_at(shape, n)) for shape in shapes)


def _at(shape: tuple[int, ...], n: int) -> tuple[int, ...]:
    return tuple(n if size == N else size for size in shape)


def _counter(rng: np.random.Generator) -> np.ndarray:
    """A random state as `ops.rng_state` returns it."""
    return np.zeros(4, np.uint32)


def _elements(name: str) -> Naive:
    """By a naive loop over all elements."""
    return Naive("n elements", lambda *xs: loops.call(name, xs[0].shape, *xs, xs[0].size), float, VECTORS)


def _convolution(image: np.ndarray, weight: np.ndarray) -> np.ndarray:
    sizes = loops.conv_sizes(image.shape, weight.shape, (1, 1), (0, 0))
    return loops.call("conv2d", (sizes[0], sizes[4], sizes[7], sizes[8]), image, weight, *sizes)


def _pool(x: np.ndarray) -> np.ndarray:
    n, c, height, width = x.shape
    return loops.call("max_pool2d", (n, c, height // 2, width // 2), x, n * c, height // 2, width // 2)


VECTORS = tuple(2**k for k in range(8, 26, 3))
SQUARES = tuple(2**k for k in range(4, 12))
_POWERS: Sizes = {"cpu": (2**20,), "gpu": (2**26,)}
_EACH = Peers(_POWERS, "2^{power}", (N,))

_VECTOR, _PAIR, _SQUARE, _SQUARES = normals((N,)), normals((N,), (N,)), normals((N, N)), normals((N, N), (N, N))
_IMAGES = normals((N, 64, 26, 26))

# Elementwise.
for _op in (
    "neg", "abs", "square", "exp", "expm1", "sin", "cos", "tanh", "erf", "sigmoid", "softplus", "relu", "squared_relu",
    "leaky_relu", "elu", "silu", "gelu", "floor", "ceil", "trunc", "round",
):  # fmt: skip
    bench(_op, ELEMENTS, _VECTOR, peers=_EACH if _op in ("exp", "relu", "gelu", "tanh") else None,
          naive=_elements(_op) if _op == "exp" else None)  # fmt: skip
bench("soft_cap", ELEMENTS, _VECTOR, lambda x: ops.soft_cap(x, 30.0))
bench("log log1p sqrt rsqrt reciprocal", ELEMENTS, lambda n: (between(0.5, 2, n),))
bench("add", ELEMENTS, _PAIR, peers=replace(_EACH, backward=False), naive=_elements("add"))
bench("mul", ELEMENTS, _PAIR, peers=_EACH)
bench("sub maximum minimum floor_divide remainder arctan2 hypot", ELEMENTS, _PAIR)
bench("equal not_equal less less_equal greater greater_equal", ELEMENTS, _PAIR, differentiable=False)
bench("bitwise_and bitwise_or bitwise_xor", ELEMENTS, lambda n: (integers(99, n),) * 2, differentiable=False)
bench("bitwise_not", ELEMENTS, lambda n: (integers(99, n),), differentiable=False)
bench("sign isnan isfinite isinf", ELEMENTS, _VECTOR, differentiable=False)
bench("div", ELEMENTS, lambda n: (normal(n), between(0.5, 2, n)))
bench("power", ELEMENTS, _VECTOR, lambda x: ops.power(x, 3), "cube")
bench("power", ELEMENTS, lambda n: (between(0.5, 2, n), normal(n)), variant="array")
bench("clip", ELEMENTS, _VECTOR, lambda x: ops.clip(x, -1, 1))
bench("where", ELEMENTS, lambda n: (integers(2, n), normal(n), normal(n)),
      lambda c, a, b: ops.where(ops.equal(c, 1), a, b))  # fmt: skip
bench("astype", ELEMENTS, _VECTOR, lambda x: ops.astype(x, "int64"), "int64", differentiable=False)
bench("dropout", ELEMENTS, lambda n: (normal(n), _counter), lambda x, rng: ops.dropout(x, 0.5, rng))
for _op in ("random_uniform", "random_normal"):
    bench(_op, ELEMENTS, lambda n: (between(0, 1, n), _counter),
          lambda like, rng, op=_op: getattr(ops, op)(rng, like.shape, dtype=like.dtype),
          differentiable=False)  # fmt: skip

# Reductions.
bench("sum", ELEMENTS, _VECTOR, variant="of a vector",
      naive=Naive("n elements", lambda x: loops.call("sum", (), x, x.size), float, VECTORS))  # fmt: skip
for _op in ("sum", "mean", "max", "min", "var", "std", "logsumexp"):
    for _axis in (None, 0, 1):
        bench(_op, SIDE, _SQUARE, variant=f"axis {_axis}", axis=_axis)
for _axis in (0, 1):
    _variant = f"axis {_axis}"
    bench("cumsum", SIDE, _SQUARE, variant=_variant, axis=_axis)
    bench("prod", SIDE, lambda n: (between(0.9, 1.1, 2 * n, 2 * n),), variant=_variant, axis=_axis)
    bench("argmax argmin", SIDE, _SQUARE, variant=_variant, differentiable=False, axis=_axis)
    bench("sort norm", SIDE, _SQUARE, variant=_variant, axis=_axis)
bench("argsort", SIDE, _SQUARE, differentiable=False)
bench("topk", SIDE, _SQUARE, lambda x: ops.topk(x, min(5, x.shape[1])), "5 of each row")
bench("any all", SIDE, _SQUARE, variant="axis 1", differentiable=False, axis=1)
bench("sum_to", IMAGES, _IMAGES, lambda x: ops.sum_to(x, (64, 1, 1)), "channels")

# Moving elements.
bench("transpose", SIDE, _SQUARE, naive=Naive(
    "n x n", lambda x: loops.call("transpose", x.shape[::-1], x, *x.shape), lambda n: n * n, SQUARES
))  # fmt: skip
bench("transpose", IMAGES, _IMAGES, lambda x: ops.transpose(x, (0, 2, 3, 1)), "to NHWC")
for _axis in (0, 1):
    bench("concatenate", SIDE, _SQUARES, lambda a, b, i=_axis: ops.concatenate((a, b), i), f"axis {_axis}")
bench("stack", SIDE, _SQUARES, lambda a, b: ops.stack((a, b), 1), "axis 1")
for _by in (1, -1):
    bench("pad", IMAGES, _IMAGES, lambda x, by=_by: ops.pad(x, ((0, 0), (0, 0), (by, by), (by, by))), f"by {_by}")
bench("flip", SIDE, _SQUARE, variant="axis 1", axis=1)
bench("split", SIDE, lambda n: (normal(n, 2 * n),), lambda x: tuple(ops.split(x, 2, 1)), "2 of axis 1")
for _axis in (0, 1):
    bench("roll", SIDE, lambda n: (normal(2 * n, 2 * n),), variant=f"axis {_axis}", shift=1, axis=_axis)
bench("diag", SIDE, _VECTOR, variant="of a vector")
bench("diagonal trace tril triu", SIDE, _SQUARE)
bench("take", SIDE, lambda n: (normal(n, n), integers(n, n)), lambda x, i: ops.take(x, i, 1), "axis 1")
bench("take_along_axis", SIDE, lambda n: (normal(n, n), integers(n, n, 1)), lambda x, i: ops.take_along_axis(x, i, 1),
      "1 a row")  # fmt: skip
bench("put_rows", SIDE, lambda n: (normal(16, n, 64), normal(16, 64), integers(n, 16)),
      lambda x, rows, i: ops.put_rows(x, rows, i, 1), "16 samples")  # fmt: skip
bench("one_hot", ROWS, lambda n: (integers(1000, n),), lambda i: ops.one_hot(i, 1000), "1000", differentiable=False)
bench("embedding", ROWS, lambda n: (integers(10000, n), normal(10000, 128)))
_grid = tuple(int(16 * 2 ** (i / 2)) for i in range(15)), 2**15
_rows = grid_levels(2, *_grid)[1]
bench("hash_grid", POINTS, lambda n: (between(0, 1, n, 2), normal(_rows, 2)), lambda x, w: ops.hash_grid(x, w, *_grid),
      "15 levels of 2-D")  # fmt: skip

# Matrix products: squares, many small ones, and the first layer of mlp.yaml.
bench(
    "matmul", SIDE, _SQUARES,
    peers=Peers({"cpu": (256, 1024), "gpu": (1024, 2048, 4096, 4095, 8192)}, "{n}", (N, N), (0,),
                precisions=True),
    naive=Naive("n x n by n x n", loops.matmul, lambda n: 2 * n**3, SQUARES),
)  # fmt: skip
bench("matmul", IMAGES, normals((N, 64, 64), (N, 64, 64)), variant="batch")
bench("matmul", ROWS, normals((N, 784), (512, 784)), lambda x, w: ops.matmul(x, w, transpose_b=True), "b transposed")

bench("tensordot", SIDE, normals((4, N, N), (4, N, N)), lambda a, b: ops.tensordot(a, b, ((0, 2), (0, 1))), "two axes")
bench("einsum", SIDE, _SQUARES, lambda a, b: ops.einsum("ij,kj->ik", a, b), "ij,kj->ik")
bench("einsum", IMAGES, normals((N, 32, 8, 16), (N, 32, 8, 16)),
      lambda q, k: ops.einsum("bqhd,bkhd->bhqk", q, k), "bqhd,bkhd->bhqk")  # fmt: skip
bench("kron", SIDE, normals((N, N), (2, 3)), variant="by 2x3")
bench("cross", ELEMENTS, normals((N, 3), (N, 3)))

# Attention: 32 heads of width 64.
for _causal in (False, True):
    bench("attention", TOKENS, normals(*[(32, N, 64)] * 3),
          lambda q, k, v, c=_causal: ops.attention(q, k, v, c), "causal" if _causal else "all keys")  # fmt: skip
bench("self_attention", TOKENS, normals((8, N, 768)), lambda x: ops.self_attention(x, 4), "8 of 4 heads")
for _f, _gates in ((ops.rnn, 1), (ops.gru, 3), (ops.lstm, 4)):

    def _hidden(x: Any, w_ih: Any, w_hh: Any, f: Callable[..., Any] = _f) -> Any:
        return f(x, w_ih, w_hh)[0]

    _inputs = normals((N, 28, 28), (_gates * 128, 28), (_gates * 128, 128))
    bench(_f.__name__, SEQUENCES, _inputs, _hidden, "28 steps, 128 units")

# Convolution and pooling: layers of lenet5.yaml, cnn.yaml and resnet.yaml. "3x3/2" is a window of stride 2.
_LAYER = Naive(
    "n images 32x26x26 to 64, 3x3", _convolution, lambda n: 2 * n * 64 * 24 * 24 * 32 * 9, (1, 2, 4, 8, 16, 32, 64, 128)
)
for _image, _out, _kernel, _stride, _padding in (
    ((1, 28, 28), 6, 5, 1, 2),
    ((6, 14, 14), 16, 5, 1, 0),
    ((1, 28, 28), 32, 3, 1, 0),
    ((32, 26, 26), 64, 3, 1, 0),
    ((16, 14, 14), 16, 3, 1, 1),
    ((16, 14, 14), 32, 3, 2, 1),
    ((16, 14, 14), 32, 1, 2, 0),
):
    bench(
        "conv2d",
        IMAGES,
        normals((N, *_image), (_out, _image[0], _kernel, _kernel)),
        lambda x, w, s=_stride, p=_padding: ops.conv2d(x, w, stride=s, padding=p),
        f"{'x'.join(map(str, _image))} to {_out}, {_kernel}x{_kernel}/{_stride}",
        naive=_LAYER if _out == 64 else None,
    )
bench("conv_transpose2d", IMAGES, normals((N, 32, 14, 14), (32, 16, 4, 4)),
      lambda x, w: ops.conv_transpose2d(x, w, stride=2, padding=1), "4x4/2")  # fmt: skip
_POOL = Naive("n images 64x24x24, 2x2", _pool, lambda n: n * 64 * 24 * 24, (1, 4, 16, 64, 256))
for _shape in ((6, 28, 28), (16, 10, 10), (64, 24, 24)):
    for _op in ("max_pool2d", "avg_pool2d"):
        bench(_op, IMAGES, normals((N, *_shape)), variant=f"{'x'.join(map(str, _shape))}, 2x2/2", kernel_size=2,
              naive=_POOL if (_op, _shape[0]) == ("max_pool2d", 64) else None)  # fmt: skip
bench("max_pool2d", IMAGES, normals((N, 64, 24, 24)), variant="64x24x24, 3x3/2", kernel_size=3, stride=2)
_series: tuple[int, ...] = (N, 32, 256)
_volume = (N, 8, 16, 16, 16)
for _name, _size, _weight in (
    ("conv1d", _series, (32, 32, 3)),
    ("conv_transpose1d", _series, (32, 16, 3)),
    ("conv3d", _volume, (32, 8, 3, 3, 3)),
    ("conv_transpose3d", _volume, (8, 16, 3, 3, 3)),
):
    bench(_name, IMAGES, normals(_size, _weight), lambda x, w, op=_name: getattr(ops, op)(x, w, padding=1),
          "3 an axis")  # fmt: skip
for _axes, _size in (("1d", _series), ("3d", _volume)):
    bench(f"max_pool{_axes} avg_pool{_axes}", IMAGES, normals(_size), variant="2 an axis", kernel_size=2)
bench("adaptive_avg_pool2d", IMAGES, normals((N, 32, 7, 7)), variant="to 1", output_size=1)


# Normalisation, softmax, losses.
def _batch_norm(training: bool) -> Callable[..., Any]:
    def f(x: Any, weight: Any, bias: Any) -> Any:
        mean, variance = (ops.full(weight.shape, value, weight.dtype, weight.device) for value in (0, 1))
        return ops.batch_norm(x, mean, variance, weight, bias, training=training)

    return f


def _labelled(classes: int) -> Inputs:
    return lambda n: (normal(n, classes), integers(classes, n))


for _c, _h in ((16, 14), (64, 26)):
    bench("batch_norm", IMAGES, normals((N, _c, _h, _h), (_c,), (_c,)), _batch_norm(True), f"{_c}x{_h}x{_h}, training")
_FEATURES = normals((N, 64, 26, 26), (64,), (64,))
bench("batch_norm", IMAGES, _FEATURES, _batch_norm(False), "64x26x26, inference")
bench("group_norm", IMAGES, _FEATURES, lambda x, weight, bias: ops.group_norm(x, 8, weight, bias), "8 groups")
bench("layer_norm", ROWS, normals((N, 512), (512,), (512,)),
      lambda x, weight, bias: ops.layer_norm(x, 512, weight, bias))  # fmt: skip
bench("softmax", ROWS, normals((N, 128)), variant="128 classes", naive=Naive(
    "n rows of 128", lambda x: loops.call("softmax", x.shape, x, *x.shape), lambda n: 128 * n,
    tuple(4**k for k in range(2, 9)),
))  # fmt: skip
for _classes in (10, 1000):
    bench("softmax log_softmax", ROWS, normals((N, _classes)), variant=f"{_classes} classes")
    bench("cross_entropy nll_loss", ROWS, _labelled(_classes), variant=f"{_classes} classes")
bench("mse_loss l1_loss huber_loss binary_cross_entropy_with_logits", ROWS,
      lambda n: (normal(n, 1000), between(0, 1, n, 1000)))  # fmt: skip

# Against other systems: products, convolutions and attention of networks.
for _out, _inside in ((512, 784), (256, 512), (10, 256)):
    against(
        "matmul", f"{_out}x{_inside}", normals((N, _inside), (_out, _inside)),
        Peers({"cpu": (128,), "gpu": (128,)}, f"{{n}}x{_inside} @ {_out}x{_inside}.T", (N, _out), (0,),
              precisions=True),
        transpose_b=True,
    )  # fmt: skip
for _device, _count, _image, _out, _padding in (
    ("cpu", 32, (1, 28, 28), 32, 0),
    ("cpu", 32, (32, 26, 26), 64, 0),
    ("cpu", 32, (16, 14, 14), 32, 1),
    ("gpu", 256, (32, 26, 26), 64, 0),
    ("gpu", 256, (64, 56, 56), 64, 1),
    ("gpu", 64, (256, 28, 28), 256, 1),
):
    _output = (N, _out, *(length + 2 * _padding - 2 for length in _image[1:]))
    against(
        "conv2d", f"{_device}, {size_text(_image)} to {_out}", normals((N, *_image), (_out, _image[0], 3, 3)),
        Peers({_device: (_count,)}, f"{{n}}x{size_text(_image)} to {_out}, 3x3", _output, (0,), precisions=True),
        padding=_padding,
    )  # fmt: skip
for _devices, _count, _shape in (
    (("cpu", "gpu"), 128, (4, 16, 16)),
    (("cpu",), 1, (4, 1024, 64)),
    (("gpu",), 128, (8, 256, 64)),
    (("gpu",), 4, (16, 2048, 64)),
):  # batch, heads, tokens and width of a head
    _peers = Peers(
        dict.fromkeys(_devices, (_count,)), f"{{n}}x{size_text(_shape)}", (N, *_shape), (0, 1, 2), precisions=True
    )
    against("attention", f"heads of {size_text(_shape)}", normals(*[(N, *_shape)] * 3), _peers)

# Against other systems: reductions and transposition of squares, and operations on the rows of a matrix.
_SIDE: Sizes = {"cpu": (1024,), "gpu": (8192,)}
for _axis in (None, 0, 1):
    _output = () if _axis is None else (N,)
    for _op in ("sum", "max"):
        _peers = Peers(_SIDE, f"{{n}}x{{n}} axis {_axis}", _output, backward=_op == "max")
        against(_op, f"squares, axis {_axis}", _SQUARE, _peers, axis=_axis)
against("cumsum", "squares, axis 1", _SQUARE, Peers(_SIDE, "{n}x{n} axis 1", (N, N)), axis=1)
against("transpose", "squares", _SQUARE, Peers(_SIDE, "{n}x{n}", (N, N), backward=False))


def _rows_of(columns: int) -> Inputs:
    return lambda n: (integers(n, n), normal(n, columns))


for _device, _count, _columns in (("cpu", 1024, 1000), ("gpu", 8192, 4096)):
    _peers, _variant = Peers({_device: (_count,)}, f"{{n}}x{_columns}", (N, _columns), (0,)), f"rows of {_columns}"
    against("softmax log_softmax", _variant, normals((N, _columns)), _peers)
    against("layer_norm", _variant, normals((N, _columns)), _peers, normalized_shape=_columns)
    against("cross_entropy", _variant, _labelled(_columns), replace(_peers, output=(), by_item=()))
    against("embedding", _variant, _rows_of(_columns), replace(_peers, name=f"{{n}} of {{n}}x{_columns}"))
for _device, _count, _length in (("cpu", 32, 24), ("gpu", 256, 56)):
    _image, _output = (64, _length, _length), (N, 64, _length // 2, _length // 2)
    _peers = Peers({_device: (_count,)}, f"{{n}}x{size_text(_image)} 2x2", _output, (0,))
    against("max_pool2d avg_pool2d", f"{size_text(_image)}, 2x2", normals((N, *_image)), _peers, kernel_size=2)

# Against other systems, on a CPU: what is bound by memory.
_CPU: Sizes = {"cpu": (1024,)}
against("matmul", "by a column", normals((N, N), (N, 1)), Peers(_CPU, "{n}x{n} @ {n}x1", (N, 1), (0,)))
against("matmul", "of a row", normals((1, N), (N, N)), Peers(_CPU, "1x{n} @ {n}x{n}", (1, N)))
against("conv2d", "depthwise", normals((N, 64, 28, 28), (64, 1, 3, 3)),
        Peers({"cpu": (32,)}, "{n}x64x28x28, depthwise 3x3", (N, 64, 28, 28), (0,)), padding=1, groups=64)  # fmt: skip
against("conv_transpose2d", "4x4/2", normals((N, 32, 14, 14), (32, 16, 4, 4)),
        Peers({"cpu": (32,)}, "{n}x32x14x14 to 16, 4x4/2", (N, 16, 28, 28), (0,)), stride=2, padding=1)  # fmt: skip
against("take", "columns", lambda n: (normal(n, n), integers(n, n)),
        Peers(_CPU, "{n} of {n}x{n} axis 1", (N, N), (0,)), axis=1)  # fmt: skip

BENCHES = [row for row in TABLE if row.sizes]
"""What `bench ops` times."""

BY_NAIVE_LOOPS = [row for row in TABLE if row.naive]
"""What `bench devices` times."""
