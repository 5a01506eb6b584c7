"""The table of single operations that are compared: inputs, sizes and options."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np

from adtrain.core.precision import FULL, PRECISIONS
from adtrain.nn.fields import size_text
from adtrain.samplers import Sampler, integers, normal

REPEATS = 10
"""Runs of an operation in one call."""

CHECKED_ITEMS = 4
"""Items (rows, images) of a result that are compared with float64, where items are independent."""

T = TypeVar("T")


class OpRunner(NamedTuple):
    """A system's operation.

    Attributes:
        run: makes the given number of calls of REPEATS runs, waits for the device, returns one element of the result.
        results: the arrays that one run returns: the output, or the gradients of the floating-point inputs. In phase
            "backward" it takes another cotangent as an optional argument.
    """

    run: Callable[[int], float]
    results: Callable[..., list[np.ndarray]]


@dataclass(frozen=True)
class OpCase:
    """An operation of `adtrain.ops` at one size. Every system maps its name to a function with the same options.

    Attributes:
        inputs: functions that draw the inputs; floating-point ones become float32, and are differentiated.
        output: the shape of the output.
        options: keyword arguments.
        by_item: positions of the inputs whose item n (on axis 0) affects only item n of the output; empty where items
            of the output depend on several items.
        precision: the argument of `ops.matmul_precision`.
        differentiable: whether its gradient is compared; False where a peer's gradient is a view that moves no data.
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


UNARY = ("exp", "relu", "gelu", "tanh")
LAYERS = {
    "cpu": [((32, 1, 28, 28), 32, 3, 0), ((32, 32, 26, 26), 64, 3, 0), ((32, 16, 14, 14), 32, 3, 1)],
    "gpu": [((256, 32, 26, 26), 64, 3, 0), ((256, 64, 56, 56), 64, 3, 1), ((64, 256, 28, 28), 256, 3, 1)],
}
"""Convolutions: images, output channels, kernel, padding."""


def cases(device: str) -> list[OpCase]:
    """The operations at sizes that suit the device: those of a training step on a CPU, large enough to fill a GPU."""
    if device == "cpu":
        return [
            *_products((256, 1024)), *_convolutions(device), *_elementwise(20), *_rows(1024, 1000), *_pools(32, 24),
            *_attentions((128, 4, 16, 16), (1, 4, 1024, 64)), *_bound_by_memory(),
        ]  # fmt: skip
    squares = (1024, 2048, 4096, 4095, 8192)
    heads = (128, 4, 16, 16), (128, 8, 256, 64), (4, 16, 2048, 64)
    by_precision = [
        (*_products(squares, p), *_convolutions(device, p), *_attentions(*heads, precision=p)) for p in PRECISIONS
    ]
    return [*chain.from_iterable(by_precision), *_elementwise(26), *_rows(8192, 4096), *_pools(256, 56)]


def _products(squares: Sequence[int], precision: str = FULL) -> Iterator[OpCase]:
    """Products of square matrices, and those in the layers of mlp.yaml."""
    for n in squares:
        inputs = normal(n, n), normal(n, n)
        yield OpCase("matmul", _named(str(n), precision), inputs, (n, n), by_item=(0,), precision=precision)
    for out, inside in ((512, 784), (256, 512), (10, 256)):
        size = _named(f"128x{inside} @ {out}x{inside}.T", precision)
        inputs, transposed = (normal(128, inside), normal(out, inside)), {"transpose_b": True}
        yield OpCase("matmul", size, inputs, (128, out), transposed, (0,), precision)


def _convolutions(device: str, precision: str = FULL) -> Iterator[OpCase]:
    for images, out, kernel, padding in LAYERS[device]:
        count, channels, height, width = images
        grown = 2 * padding - kernel + 1
        inputs = normal(*images), normal(out, channels, kernel, kernel)
        size = _named(f"{size_text(images)} to {out}, {kernel}x{kernel}", precision)
        output = (count, out, height + grown, width + grown)
        yield OpCase("conv2d", size, inputs, output, {"padding": padding}, (0,), precision)


def _attentions(*shapes: tuple[int, ...], precision: str = FULL) -> Iterator[OpCase]:
    """Self-attention; shapes are batch, heads, tokens and width of a head."""
    for shape in shapes:
        yield OpCase(
            "attention", _named(size_text(shape), precision), (normal(*shape),) * 3, shape, {}, (0, 1, 2), precision
        )


def _elementwise(power: int) -> Iterator[OpCase]:
    n, size = 2**power, f"2^{power}"
    for op in UNARY:
        yield OpCase(op, size, (normal(n),), (n,))
    yield OpCase("add", size, (normal(n), normal(n)), (n,), differentiable=False)
    yield OpCase("mul", size, (normal(n), normal(n)), (n,))


def _rows(rows: int, columns: int) -> Iterator[OpCase]:
    """Reductions and transposition of a square matrix; operations on the rows of a rectangular one."""
    square, size = (normal(rows, rows),), f"{rows}x{rows}"
    reduced: dict[int | None, tuple[int, ...]] = {None: (), 0: (rows,), 1: (rows,)}
    for axis, out in reduced.items():
        yield OpCase("sum", f"{size} axis {axis}", square, out, {"axis": axis}, differentiable=False)
        yield OpCase("max", f"{size} axis {axis}", square, out, {"axis": axis})
    yield OpCase("cumsum", f"{size} axis 1", square, (rows, rows), {"axis": 1})
    yield OpCase("transpose", size, square, (rows, rows), differentiable=False)

    matrix, shape, size = normal(rows, columns), (rows, columns), f"{rows}x{columns}"
    for op in ("softmax", "log_softmax"):
        yield OpCase(op, size, (matrix,), shape, by_item=(0,))
    yield OpCase("layer_norm", size, (matrix,), shape, {"normalized_shape": columns}, (0,))
    yield OpCase("cross_entropy", size, (matrix, integers(columns, rows)), ())
    yield OpCase("embedding", f"{rows} of {size}", (integers(rows, rows), matrix), shape, by_item=(0,))


def _bound_by_memory() -> Iterator[OpCase]:
    """Matrix-vector products, a depthwise and a transposed convolution, and a gather of columns."""
    n = 1024
    yield OpCase("matmul", f"{n}x{n} @ {n}x1", (normal(n, n), normal(n, 1)), (n, 1), by_item=(0,))
    yield OpCase("matmul", f"1x{n} @ {n}x{n}", (normal(1, n), normal(n, n)), (1, n))
    images, weight = normal(32, 64, 28, 28), normal(64, 1, 3, 3)
    options = {"padding": 1, "groups": 64}
    yield OpCase("conv2d", "32x64x28x28, depthwise 3x3", (images, weight), (32, 64, 28, 28), options, (0,))
    images, weight = normal(32, 32, 14, 14), normal(32, 16, 4, 4)
    options = {"stride": 2, "padding": 1}
    size = "32x32x14x14 to 16, 4x4/2"
    yield OpCase("conv_transpose2d", size, (images, weight), (32, 16, 28, 28), options, (0,))
    yield OpCase("take", f"{n} of {n}x{n} axis 1", (normal(n, n), integers(n, n)), (n, n), {"axis": 1}, (0,))


def _pools(count: int, length: int) -> Iterator[OpCase]:
    images, pooled = (count, 64, length, length), (count, 64, length // 2, length // 2)
    for op in ("max_pool2d", "avg_pool2d"):
        yield OpCase(op, f"{size_text(images)} 2x2", (normal(*images),), pooled, {"kernel_size": 2}, (0,))


def _named(size: str, precision: str) -> str:
    return size if precision == FULL else f"{size} {precision}"
