"""The table of operations that `adtrain bench` times, each at several sizes n."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adtrain import ops
from adtrain.samplers import Sampler, between, integers, normal

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
SEQUENCES: Sizes = {"cpu": (8, 32, 128), "gpu": (8, 32, 128, 1024)}


@dataclass(frozen=True)
class Bench:
    """One operation, at any size.

    Attributes:
        op: name of the public function in `adtrain.ops`.
        variant: other options, such as the axis; ``op`` and ``variant`` together are unique.
        sizes: the default sizes.
        inputs: functions that draw the inputs; each floating-point input is differentiated by itself.
        f: the operation as a function of the inputs; its parameters' names name the gradients.
        differentiable: whether there is a backward phase to time.
    """

    op: str
    variant: str
    sizes: Sizes
    inputs: Inputs
    f: Callable[..., Any]
    differentiable: bool = True


BENCHES: list[Bench] = []

VIEWS = ("reshape", "squeeze", "expand_dims", "broadcast_to", "stop_gradient", "tile", "repeat", "getitem", "slice")
"""Operations without a row: they are views, `broadcast_to` and `reshape` together, or `slice` under another name."""


def bench(
    op: str,
    sizes: Sizes,
    inputs: Inputs,
    f: Callable[..., Any] | None = None,
    variant: str = "",
    differentiable: bool = True,
) -> None:
    BENCHES.append(Bench(op, variant, sizes, inputs, f or getattr(ops, op), differentiable))


def batch(shape: tuple[int, ...], *weights: tuple[int, ...]) -> Inputs:
    """An array (n, *shape), and arrays of the shapes of `weights`."""
    return lambda n: (normal(n, *shape), *(normal(*w) for w in weights))


def _counter(rng: np.random.Generator) -> np.ndarray:
    """A random state as `ops.rng_state` returns it."""
    return np.zeros(4, np.uint32)


# Elementwise.
for _op in (
    "neg", "abs", "square", "exp", "expm1", "sin", "cos", "tanh", "erf", "sigmoid", "softplus", "relu", "leaky_relu",
    "elu", "silu", "gelu", "floor", "ceil", "trunc", "round",
):  # fmt: skip
    bench(_op, ELEMENTS, lambda n: (normal(n),))
for _op in ("log", "log1p", "sqrt", "rsqrt", "reciprocal"):
    bench(_op, ELEMENTS, lambda n: (between(0.5, 2, n),))
for _op in ("add", "sub", "mul", "maximum", "minimum", "floor_divide", "remainder", "arctan2", "hypot"):
    bench(_op, ELEMENTS, lambda n: (normal(n), normal(n)))
for _op in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"):
    bench(_op, ELEMENTS, lambda n: (normal(n), normal(n)), differentiable=False)
for _op in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    bench(_op, ELEMENTS, lambda n: (integers(99, n), integers(99, n)), differentiable=False)
bench("bitwise_not", ELEMENTS, lambda n: (integers(99, n),), differentiable=False)
for _op in ("sign", "isnan", "isfinite", "isinf"):
    bench(_op, ELEMENTS, lambda n: (normal(n),), differentiable=False)
bench("div", ELEMENTS, lambda n: (normal(n), between(0.5, 2, n)))
bench("power", ELEMENTS, lambda n: (normal(n),), lambda x: ops.power(x, 3), "cube")
bench("power", ELEMENTS, lambda n: (between(0.5, 2, n), normal(n)), variant="array")
bench("clip", ELEMENTS, lambda n: (normal(n),), lambda x: ops.clip(x, -1, 1))
bench("where", ELEMENTS, lambda n: (integers(2, n), normal(n), normal(n)),
      lambda c, a, b: ops.where(ops.equal(c, 1), a, b))  # fmt: skip
bench("astype", ELEMENTS, lambda n: (normal(n),), lambda x: ops.astype(x, "int64"), "int64", differentiable=False)
bench("dropout", ELEMENTS, lambda n: (normal(n), _counter), lambda x, rng: ops.dropout(x, 0.5, rng))
bench("random_uniform", ELEMENTS, lambda n: (between(0, 1, n), _counter),
      lambda like, rng: ops.random_uniform(rng, like.shape, dtype=like.dtype), differentiable=False)  # fmt: skip
bench("random_normal", ELEMENTS, lambda n: (between(0, 1, n), _counter),
      lambda like, rng: ops.random_normal(rng, like.shape, dtype=like.dtype), differentiable=False)  # fmt: skip

# Reductions.
for _op in ("sum", "mean", "max", "min", "var", "std", "logsumexp"):
    for _axis in (None, 0, 1):
        bench(_op, SIDE, lambda n: (normal(n, n),), lambda x, op=_op, i=_axis: getattr(ops, op)(x, i), f"axis {_axis}")
for _axis in (0, 1):
    bench("cumsum", SIDE, lambda n: (normal(n, n),), lambda x, i=_axis: ops.cumsum(x, i), f"axis {_axis}")
    bench(
        "prod", SIDE, lambda n: (between(0.9, 1.1, 2 * n, 2 * n),), lambda x, i=_axis: ops.prod(x, i), f"axis {_axis}"
    )
    for _op in ("argmax", "argmin"):
        bench(_op, SIDE, lambda n: (normal(n, n),), lambda x, op=_op, i=_axis: getattr(ops, op)(x, i), f"axis {_axis}",
              differentiable=False)  # fmt: skip
    bench("sort", SIDE, lambda n: (normal(n, n),), lambda x, i=_axis: ops.sort(x, i), f"axis {_axis}")
    bench("norm", SIDE, lambda n: (normal(n, n),), lambda x, i=_axis: ops.norm(x, axis=i), f"axis {_axis}")
bench("argsort", SIDE, lambda n: (normal(n, n),), differentiable=False)
bench("topk", SIDE, lambda n: (normal(n, n),), lambda x: ops.topk(x, min(5, x.shape[1])), "5 of each row")
bench("any", SIDE, lambda n: (normal(n, n),), lambda x: ops.any(x, 1), "axis 1", differentiable=False)
bench("all", SIDE, lambda n: (normal(n, n),), lambda x: ops.all(x, 1), "axis 1", differentiable=False)
bench("sum_to", IMAGES, batch((64, 26, 26)), lambda x: ops.sum_to(x, (64, 1, 1)), "channels")

# Moving elements.
bench("transpose", SIDE, lambda n: (normal(n, n),))
bench("transpose", IMAGES, batch((64, 26, 26)), lambda x: ops.transpose(x, (0, 2, 3, 1)), "to NHWC")
for _axis in (0, 1):
    bench("concatenate", SIDE, lambda n: (normal(n, n), normal(n, n)),
          lambda a, b, i=_axis: ops.concatenate((a, b), i), f"axis {_axis}")  # fmt: skip
bench("stack", SIDE, lambda n: (normal(n, n), normal(n, n)), lambda a, b: ops.stack((a, b), 1), "axis 1")
bench("pad", IMAGES, batch((64, 26, 26)), lambda x: ops.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), "by 1")
bench("pad", IMAGES, batch((64, 26, 26)), lambda x: ops.pad(x, ((0, 0), (0, 0), (-1, -1), (-1, -1))), "by -1")
bench("flip", SIDE, lambda n: (normal(n, n),), lambda x: ops.flip(x, 1), "axis 1")
bench("split", SIDE, lambda n: (normal(n, 2 * n),), lambda x: tuple(ops.split(x, 2, 1)), "2 of axis 1")
for _axis in (0, 1):
    bench("roll", SIDE, lambda n: (normal(2 * n, 2 * n),), lambda x, i=_axis: ops.roll(x, 1, i), f"axis {_axis}")
bench("diag", SIDE, lambda n: (normal(n),), variant="of a vector")
for _op in ("diagonal", "trace", "tril", "triu"):
    bench(_op, SIDE, lambda n: (normal(n, n),))
bench("take", SIDE, lambda n: (normal(n, n), integers(n, n)), lambda x, i: ops.take(x, i, 1), "axis 1")
bench("take_along_axis", SIDE, lambda n: (normal(n, n), integers(n, n, 1)), lambda x, i: ops.take_along_axis(x, i, 1),
      "1 a row")  # fmt: skip
bench("one_hot", ROWS, lambda n: (integers(1000, n),), lambda i: ops.one_hot(i, 1000), "1000", differentiable=False)
bench("embedding", ROWS, lambda n: (integers(10000, n), normal(10000, 128)))

# Matrix products: squares, many small ones, and the first layer of mlp.yaml.
bench("matmul", SIDE, lambda n: (normal(n, n), normal(n, n)))
bench("matmul", IMAGES, lambda n: (normal(n, 64, 64), normal(n, 64, 64)), variant="batch")
bench("matmul", ROWS, batch((784,), (512, 784)),
      lambda x, w: ops.matmul(x, w, transpose_b=True), "b transposed")  # fmt: skip

bench("tensordot", SIDE, lambda n: (normal(4, n, n), normal(4, n, n)),
      lambda a, b: ops.tensordot(a, b, ((0, 2), (0, 1))), "two axes")  # fmt: skip
bench("einsum", SIDE, lambda n: (normal(n, n), normal(n, n)), lambda a, b: ops.einsum("ij,kj->ik", a, b), "ij,kj->ik")
bench("einsum", IMAGES, lambda n: (normal(n, 32, 8, 16), normal(n, 32, 8, 16)),
      lambda q, k: ops.einsum("bqhd,bkhd->bhqk", q, k), "bqhd,bkhd->bhqk")  # fmt: skip
bench("kron", SIDE, lambda n: (normal(n, n), normal(2, 3)), variant="by 2x3")
bench("cross", ELEMENTS, lambda n: (normal(n, 3), normal(n, 3)))

# Attention: 32 heads of width 64.
for _causal in (False, True):
    bench("attention", TOKENS, lambda n: (normal(32, n, 64),) * 3,
          lambda q, k, v, c=_causal: ops.attention(q, k, v, c), "causal" if _causal else "all keys")  # fmt: skip
bench("self_attention", TOKENS, lambda n: (normal(8, n, 768),), lambda x: ops.self_attention(x, 4), "8 of 4 heads")


def _sequences(gates: int) -> Inputs:
    return lambda n: (normal(n, 28, 28), normal(gates * 128, 28), normal(gates * 128, 128))


for _f, _gates in ((ops.rnn, 1), (ops.gru, 3), (ops.lstm, 4)):

    def _hidden(x: Any, w_ih: Any, w_hh: Any, f: Callable[..., Any] = _f) -> Any:
        return f(x, w_ih, w_hh)[0]

    bench(_f.__name__, SEQUENCES, _sequences(_gates), _hidden, "28 steps, 128 units")

# Convolution and pooling: layers of lenet5.yaml, cnn.yaml and resnet.yaml. "3x3/2" is a window of stride 2.
for _image, _out, _kernel, _stride, _padding in (
    ((1, 28, 28), 6, 5, 1, 2),
    ((6, 14, 14), 16, 5, 1, 0),
    ((1, 28, 28), 32, 3, 1, 0),
    ((32, 26, 26), 64, 3, 1, 0),
    ((16, 14, 14), 16, 3, 1, 1),
    ((16, 14, 14), 32, 3, 2, 1),
    ((16, 14, 14), 32, 1, 2, 0),
):
    bench("conv2d", IMAGES, batch(_image, (_out, _image[0], _kernel, _kernel)),
          lambda x, w, s=_stride, p=_padding: ops.conv2d(x, w, stride=s, padding=p),
          f"{'x'.join(map(str, _image))} to {_out}, {_kernel}x{_kernel}/{_stride}")  # fmt: skip
bench("conv_transpose2d", IMAGES, batch((32, 14, 14), (32, 16, 4, 4)),
      lambda x, w: ops.conv_transpose2d(x, w, stride=2, padding=1), "4x4/2")  # fmt: skip
for _shape in ((6, 28, 28), (16, 10, 10), (64, 24, 24)):
    for _op in ("max_pool2d", "avg_pool2d"):
        bench(_op, IMAGES, batch(_shape), lambda x, op=_op: getattr(ops, op)(x, 2),
              f"{'x'.join(map(str, _shape))}, 2x2/2")  # fmt: skip
bench("max_pool2d", IMAGES, batch((64, 24, 24)), lambda x: ops.max_pool2d(x, 3, 2), "64x24x24, 3x3/2")
_series, _volume = (32, 256), (8, 16, 16, 16)
for _name, _inputs in (
    ("conv1d", batch(_series, (32, 32, 3))),
    ("conv_transpose1d", batch(_series, (32, 16, 3))),
    ("conv3d", batch(_volume, (32, 8, 3, 3, 3))),
    ("conv_transpose3d", batch(_volume, (8, 16, 3, 3, 3))),
):
    bench(_name, IMAGES, _inputs, lambda x, w, op=_name: getattr(ops, op)(x, w, padding=1), "3 an axis")
for _axes, _inputs in (("1d", batch(_series)), ("3d", batch(_volume))):
    for _op in (f"max_pool{_axes}", f"avg_pool{_axes}"):
        bench(_op, IMAGES, _inputs, lambda x, op=_op: getattr(ops, op)(x, 2), "2 an axis")
bench("adaptive_avg_pool2d", IMAGES, batch((32, 7, 7)), lambda x: ops.adaptive_avg_pool2d(x, 1), "to 1")


# Normalisation, softmax, losses.
def _batch_norm(training: bool) -> Callable[..., Any]:
    def f(x: Any, weight: Any, bias: Any) -> Any:
        mean, variance = (ops.full(weight.shape, value, weight.dtype, weight.device) for value in (0, 1))
        return ops.batch_norm(x, mean, variance, weight, bias, training=training)

    return f


def _labelled(classes: int) -> Inputs:
    return lambda n: (normal(n, classes), integers(classes, n))


for _c, _h in ((16, 14), (64, 26)):
    bench("batch_norm", IMAGES, batch((_c, _h, _h), (_c,), (_c,)), _batch_norm(True),
          f"{_c}x{_h}x{_h}, training")  # fmt: skip
_FEATURES = batch((64, 26, 26), (64,), (64,))
bench("batch_norm", IMAGES, _FEATURES, _batch_norm(False), "64x26x26, inference")
bench("group_norm", IMAGES, _FEATURES, lambda x, weight, bias: ops.group_norm(x, 8, weight, bias), "8 groups")
bench("layer_norm", ROWS, batch((512,), (512,), (512,)),
      lambda x, weight, bias: ops.layer_norm(x, 512, weight, bias))  # fmt: skip
for _classes in (10, 1000):
    for _op in ("softmax", "log_softmax"):
        bench(_op, ROWS, batch((_classes,)), variant=f"{_classes} classes")
    for _op in ("cross_entropy", "nll_loss"):
        bench(_op, ROWS, _labelled(_classes), variant=f"{_classes} classes")
for _op in ("mse_loss", "l1_loss", "huber_loss", "binary_cross_entropy_with_logits"):
    bench(_op, ROWS, lambda n: (normal(n, 1000), between(0, 1, n, 1000)))
