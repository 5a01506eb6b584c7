"""The standard sizes of operations that `adtrain bench` times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from adtrain import ops
from adtrain.cases import Sampler, between, integers, normal


@dataclass(frozen=True)
class Bench:
    """One operation at one size.

    Attributes:
        op: the public function, as users call it.
        size: lengths of the inputs and what else matters; ``op`` and ``size`` together are unique.
        f: the operation as a function of the inputs.
        inputs: makers of the inputs; floating-point ones are differentiated.
        differentiable: whether there is a backward to time.
    """

    op: str
    size: str
    f: Callable[..., Any]
    inputs: tuple[Sampler, ...]
    differentiable: bool = True


BENCHES: list[Bench] = []

VIEWS = ("reshape", "squeeze", "expand_dims", "broadcast_to", "stop_gradient", "getitem", "slice")
"""Operations that have no row of their own: they make a view and move nothing, or are `slice` by another name."""

ELEMENTS = (2**12, 2**20)
"""For elementwise operations: 16 KiB an array, where what a call costs shows, and 4 MiB; for some 16 MiB as well."""


def _counter(rng: np.random.Generator) -> np.ndarray:
    """A random state as `ops.rng_state` makes it."""
    return np.zeros(4, np.uint32)


def bench(
    op: str, size: str, *inputs: Sampler, f: Callable[..., Any] | None = None, differentiable: bool = True
) -> None:
    BENCHES.append(Bench(op, size, f or getattr(ops, op), inputs, differentiable))


# Elementwise.
_POSITIVE = {"log", "log1p", "sqrt", "rsqrt", "reciprocal"}
_NO_DERIVATIVE = {"sign", "equal", "not_equal", "less", "less_equal", "greater", "greater_equal"}
_UNARY = (
    "neg", "abs", "sign", "square", "reciprocal", "sqrt", "rsqrt", "exp", "expm1", "log", "log1p", "sin", "cos",
    "tanh", "erf", "sigmoid", "softplus", "relu", "leaky_relu", "elu", "silu", "gelu",
)  # fmt: skip
_BINARY = (
    "add", "sub", "mul", "maximum", "minimum", "equal", "not_equal", "less", "less_equal", "greater", "greater_equal"
)  # fmt: skip


def _elementwise(n: int, names: Iterable[str]) -> None:
    for op in names:
        inputs = [between(0.5, 2, n) if op in _POSITIVE else normal(n)]
        if op in _BINARY:
            inputs.append(normal(n))
        bench(op, f"2^{n.bit_length() - 1}", *inputs, differentiable=op not in _NO_DERIVATIVE)


for _n in ELEMENTS:
    _elementwise(_n, (*_UNARY, *_BINARY))
    _size = f"2^{_n.bit_length() - 1}"
    bench("div", _size, normal(_n), between(0.5, 2, _n))
    bench("power", f"{_size}, cube", normal(_n), f=lambda x: ops.power(x, 3))
    bench("power", f"{_size}, array", between(0.5, 2, _n), normal(_n))
    bench("clip", _size, normal(_n), f=lambda x: ops.clip(x, -1, 1))
    bench("where", _size, integers(2, _n), normal(_n), normal(_n), f=lambda c, a, b: ops.where(ops.equal(c, 1), a, b))
    bench("astype", f"{_size}, float64", normal(_n), f=lambda x: ops.astype(x, "float64"), differentiable=False)
    bench("dropout", _size, normal(_n), _counter, f=lambda x, rng: ops.dropout(x, 0.5, rng))
    bench("random_uniform", _size, _counter, f=lambda rng, n=_n: ops.random_uniform(rng, (n,)), differentiable=False)
_elementwise(2**22, ("add", "mul", "relu", "exp"))
bench("add", "1024x1024 + 1024", normal(1024, 1024), normal(1024))

# Reductions.
for _op in ("sum", "mean", "max", "min", "var", "logsumexp"):
    for _axis in (None, 0, 1):
        bench(_op, f"1024x1024, axis {_axis}", normal(1024, 1024), f=lambda x, op=_op, i=_axis: getattr(ops, op)(x, i))
for _axis in (0, 1):
    bench("cumsum", f"1024x1024, axis {_axis}", normal(1024, 1024), f=lambda x, i=_axis: ops.cumsum(x, i))
    bench("argmax", f"1024x1024, axis {_axis}", normal(1024, 1024), f=lambda x, i=_axis: ops.argmax(x, i),
          differentiable=False)  # fmt: skip
bench("sum_to", "32x64x26x26 to 64x1x1", normal(32, 64, 26, 26), f=lambda x: ops.sum_to(x, (64, 1, 1)))

# Moving elements.
bench("transpose", "1024x1024", normal(1024, 1024))
bench("transpose", "32x64x26x26 to NHWC", normal(32, 64, 26, 26), f=lambda x: ops.transpose(x, (0, 2, 3, 1)))
bench("concatenate", "2 of 512x1024, axis 0", normal(512, 1024), normal(512, 1024), f=lambda *xs: ops.concatenate(xs))
bench("concatenate", "2 of 1024x512, axis 1", normal(1024, 512), normal(1024, 512),
      f=lambda *xs: ops.concatenate(xs, 1))  # fmt: skip
bench("stack", "2 of 512x1024, axis 1", normal(512, 1024), normal(512, 1024), f=lambda *xs: ops.stack(xs, 1))
bench("pad", "32x64x26x26, by 1", normal(32, 64, 26, 26), f=lambda x: ops.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))))
bench("flip", "1024x1024, axis 1", normal(1024, 1024), f=lambda x: ops.flip(x, 1))
bench("take", "1024 of 1024x1024, axis 1", normal(1024, 1024), integers(1024, 1024), f=lambda x, i: ops.take(x, i, 1))
bench("take_along_axis", "1024x1024, 1 a row", normal(1024, 1024), integers(1024, 1024, 1),
      f=lambda x, i: ops.take_along_axis(x, i, 1))  # fmt: skip
bench("one_hot", "1024 of 1000", integers(1000, 1024), f=lambda i: ops.one_hot(i, 1000), differentiable=False)
bench("embedding", "32x64 of 10000x128", integers(10000, 32, 64), normal(10000, 128))

# Matrix products: squares, then the layers of mlp.yaml at batch 128.
for _n in (64, 128, 256, 512, 1024):
    bench("matmul", f"{_n}x{_n}x{_n}", normal(_n, _n), normal(_n, _n))
bench("matmul", "32 of 64x64x64", normal(32, 64, 64), normal(32, 64, 64))
for _out, _in in ((512, 784), (256, 512), (10, 256)):
    bench("matmul", f"128x{_in} @ {_out}x{_in}.T", normal(128, _in), normal(_out, _in),
          f=lambda x, w: ops.matmul(x, w, transpose_b=True))  # fmt: skip

# Convolution and pooling: layers of lenet5.yaml, cnn.yaml and resnet.yaml at batch 32. "3x3/2" is a window of stride 2.
for _image, _out, _kernel, _stride, _padding in (
    ((1, 28, 28), 6, 5, 1, 2),
    ((6, 14, 14), 16, 5, 1, 0),
    ((1, 28, 28), 32, 3, 1, 0),
    ((32, 26, 26), 64, 3, 1, 0),
    ((16, 14, 14), 16, 3, 1, 1),
    ((16, 14, 14), 32, 3, 2, 1),
    ((16, 14, 14), 32, 1, 2, 0),
):
    bench("conv2d", f"32x{'x'.join(map(str, _image))} to {_out}, {_kernel}x{_kernel}/{_stride}", normal(32, *_image),
          normal(_out, _image[0], _kernel, _kernel),
          f=lambda x, w, s=_stride, p=_padding: ops.conv2d(x, w, stride=s, padding=p))  # fmt: skip
bench("conv_transpose2d", "32x32x14x14 to 16, 4x4/2", normal(32, 32, 14, 14), normal(32, 16, 4, 4),
      f=lambda x, w: ops.conv_transpose2d(x, w, stride=2, padding=1))  # fmt: skip
for _shape in ((6, 28, 28), (16, 10, 10), (64, 24, 24)):
    _size = f"32x{'x'.join(map(str, _shape))}, 2x2/2"
    bench("max_pool2d", _size, normal(32, *_shape), f=lambda x: ops.max_pool2d(x, 2))
    bench("avg_pool2d", _size, normal(32, *_shape), f=lambda x: ops.avg_pool2d(x, 2))
bench("max_pool2d", "32x64x24x24, 3x3/2", normal(32, 64, 24, 24), f=lambda x: ops.max_pool2d(x, 3, 2))
bench("adaptive_avg_pool2d", "32x32x7x7 to 1", normal(32, 32, 7, 7), f=lambda x: ops.adaptive_avg_pool2d(x, 1))


# Normalisation, softmax, losses.
def _batch_norm(training: bool) -> Callable[..., Any]:
    def f(x: Any, weight: Any, bias: Any) -> Any:
        mean, variance = (ops.full(weight.shape, value, weight.dtype, weight.device) for value in (0, 1))
        return ops.batch_norm(x, mean, variance, weight, bias, training=training)

    return f


bench("batch_norm", "32x16x14x14, training", normal(32, 16, 14, 14), normal(16), normal(16), f=_batch_norm(True))
bench("batch_norm", "32x64x26x26, training", normal(32, 64, 26, 26), normal(64), normal(64), f=_batch_norm(True))
bench("batch_norm", "32x64x26x26, inference", normal(32, 64, 26, 26), normal(64), normal(64), f=_batch_norm(False))
bench("layer_norm", "1024x512", normal(1024, 512), normal(512), normal(512),
      f=lambda x, w, b: ops.layer_norm(x, 512, w, b))  # fmt: skip
bench("group_norm", "32x64x26x26, 8 groups", normal(32, 64, 26, 26), normal(64), normal(64),
      f=lambda x, w, b: ops.group_norm(x, 8, w, b))  # fmt: skip
for _n, _classes in ((128, 10), (1024, 1000)):
    _size = f"{_n}x{_classes}"
    bench("softmax", _size, normal(_n, _classes))
    bench("log_softmax", _size, normal(_n, _classes))
    bench("cross_entropy", _size, normal(_n, _classes), integers(_classes, _n))
    bench("nll_loss", _size, normal(_n, _classes), integers(_classes, _n))
for _op in ("mse_loss", "l1_loss", "huber_loss", "binary_cross_entropy_with_logits"):
    bench(_op, "1024x1000", normal(1024, 1000), between(0, 1, 1024, 1000))
