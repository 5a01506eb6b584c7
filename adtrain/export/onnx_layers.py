"""Each layer as ONNX nodes that compute what it computes when evaluating: one function a kind, in one table."""

from __future__ import annotations

from collections.abc import Callable
from math import pi, prod, sqrt
from typing import Any

import numpy as np

from adtrain import nn
from adtrain.export.onnx_graph import Place
from adtrain.nn.fields import pair
from adtrain.ops.pool import averages

Translation = Callable[[Place, Any, str, nn.Shape], str]
"""(place, layer, name of its input, shape of an input sample) to the name of its output."""


def translate(place: Place, module: nn.Module, x: str, shape: nn.Shape) -> str:
    """Write a module that reads `x`, (N, *shape), into the graph; the name of its output.

    float64 is written as float32.
    """
    return TRANSLATIONS[type(module)](place, module, x, shape)


def linear(place: Place, layer: nn.Linear, x: str, shape: nn.Shape) -> str:
    weight, bias = place.weight("weight"), [place.weight("bias")] if layer.bias else []
    if len(shape) == 1:
        return place.op("Gemm", x, weight, *bias, transB=1)
    y = place.op("MatMul", x, place.op("Transpose", weight, perm=[1, 0]))
    return place.op("Add", y, *bias) if bias else y


def conv2d(place: Place, layer: nn.Conv2d, x: str, shape: nn.Shape) -> str:
    low, extra = layer.paddings()
    high = tuple(p + e for p, e in zip(low, extra, strict=True))
    return _convolution("Conv", place, layer, x, pads=[*low, *high])


def conv_transpose2d(place: Place, layer: nn.ConvTranspose2d, x: str, shape: nn.Shape) -> str:
    pads = pair(layer.padding) * 2
    return _convolution("ConvTranspose", place, layer, x, pads=pads, output_padding=pair(layer.output_padding))


def _convolution(op: str, place: Place, layer: nn.Conv2d | nn.ConvTranspose2d, x: str, **more: Any) -> str:
    arrays = [place.weight(name) for name in ("weight", "bias") if name == "weight" or layer.bias]
    sizes = {"kernel_shape": layer.kernel_size, "strides": layer.stride, "dilations": layer.dilation}
    pairs = {name: pair(size) for name, size in sizes.items()}
    return place.op(op, x, *arrays, **pairs, group=layer.groups, **more)


def max_pool2d(place: Place, layer: nn.MaxPool2d, x: str, shape: nn.Shape) -> str:
    return place.op("MaxPool", x, **_windows(layer))


def avg_pool2d(place: Place, layer: nn.AvgPool2d, x: str, shape: nn.Shape) -> str:
    return place.op("AveragePool", x, **_windows(layer), count_include_pad=1)


def _windows(layer: nn.MaxPool2d | nn.AvgPool2d) -> dict[str, tuple[int, ...]]:
    kernel = pair(layer.kernel_size)
    stride = kernel if layer.stride is None else pair(layer.stride)
    return {"kernel_shape": kernel, "strides": stride, "pads": pair(layer.padding) * 2}


def adaptive_avg_pool2d(place: Place, layer: nn.AdaptiveAvgPool2d, x: str, shape: nn.Shape) -> str:
    sizes = pair(layer.output_size)
    if sizes == (1, 1):
        return place.op("GlobalAveragePool", x)
    rows, columns = (averages(n, count) for n, count in zip(shape[1:], sizes, strict=True))
    means = place.op("MatMul", place.constant("rows", rows), x)
    return place.op("MatMul", means, place.constant("columns", columns.T))


def batch_norm(place: Place, layer: nn.BatchNorm1d | nn.BatchNorm2d, x: str, shape: nn.Shape) -> str:
    scale, shift = _scale_and_shift(place, layer.affine, shape[:1])
    statistics = place.weight("running_mean"), place.weight("running_var")
    return place.op("BatchNormalization", x, scale, shift, *statistics, epsilon=layer.eps)


def layer_norm(place: Place, layer: nn.LayerNorm, x: str, shape: nn.Shape) -> str:
    axes = len(layer.normalized_shape) if isinstance(layer.normalized_shape, tuple) else 1
    scale, shift = _scale_and_shift(place, layer.elementwise_affine, shape[-axes:])
    return place.op("LayerNormalization", x, scale, shift, axis=-axes, epsilon=layer.eps)


def group_norm(place: Place, layer: nn.GroupNorm, x: str, shape: nn.Shape) -> str:
    """Each group as one channel of an instance normalisation; weight and bias are of the channels proper."""
    grouped = _reshape(place, "groups", x, (layer.num_groups, prod(shape) // layer.num_groups))
    ones, zeros = place.constant("ones", np.ones(layer.num_groups)), place.constant("zeros", np.zeros(layer.num_groups))
    y = place.op("InstanceNormalization", grouped, ones, zeros, epsilon=layer.eps)
    y = _reshape(place, "shape", y, shape)
    if not layer.affine:
        return y
    per_channel = place.constant("per_channel", [-1, *[1] * (len(shape) - 1)])
    scale, shift = (place.op("Reshape", place.weight(name), per_channel) for name in ("weight", "bias"))
    return place.op("Add", place.op("Mul", y, scale), shift)


def _scale_and_shift(place: Place, affine: bool, shape: nn.Shape) -> tuple[str, str]:
    """A layer's weight and bias, or the ones and zeros in their place, which ONNX does not do without."""
    if affine:
        return place.weight("weight"), place.weight("bias")
    return place.constant("ones", np.ones(shape)), place.constant("zeros", np.zeros(shape))


def embedding(place: Place, layer: nn.Embedding, x: str, shape: nn.Shape) -> str:
    return place.op("Gather", place.weight("weight"), x, axis=0)


def dropout(place: Place, layer: nn.Dropout, x: str, shape: nn.Shape) -> str:
    return x


def flatten(place: Place, layer: nn.Flatten, x: str, shape: nn.Shape) -> str:
    return place.op("Flatten", x, axis=1)


def reshape(place: Place, layer: nn.Reshape, x: str, shape: nn.Shape) -> str:
    return _reshape(place, "shape", x, layer.output_shape(shape))


def _reshape(place: Place, name: str, x: str, shape: nn.Shape) -> str:
    return place.op("Reshape", x, place.constant(name, [0, *shape]))  # 0 keeps the batch's size


def gelu(place: Place, layer: nn.Gelu, x: str, shape: nn.Shape) -> str:
    """x (1 + f(x)) / 2, where f is erf(x / √2) or a tanh of a cubic."""
    half, one = place.constant("half", 0.5), place.constant("one", 1.0)
    if layer.approximate == "none":
        y = place.op("Erf", place.op("Mul", x, place.constant("sqrt_half", sqrt(0.5))))
    else:
        cube = place.op("Mul", place.op("Mul", place.op("Mul", x, x), x), place.constant("cubic", 0.044715))
        y = place.op("Mul", place.op("Add", x, cube), place.constant("scale", sqrt(2 / pi)))
        y = place.op("Tanh", y)
    return place.op("Mul", place.op("Mul", x, half), place.op("Add", y, one))


def silu(place: Place, layer: nn.Silu, x: str, shape: nn.Shape) -> str:
    return place.op("Mul", x, place.op("Sigmoid", x))


def leaky_relu(place: Place, layer: nn.LeakyRelu, x: str, shape: nn.Shape) -> str:
    return place.op("LeakyRelu", x, alpha=layer.negative_slope)


def elu(place: Place, layer: nn.Elu, x: str, shape: nn.Shape) -> str:
    return place.op("Elu", x, alpha=layer.alpha)


def same(op: str) -> Translation:
    """A layer that is one operator of ONNX without attributes."""
    return lambda place, layer, x, shape: place.op(op, x)


def over_axis(op: str) -> Translation:
    return lambda place, layer, x, shape: place.op(op, x, axis=layer.dim)


def sequential(place: Place, module: nn.Sequential, x: str, shape: nn.Shape) -> str:
    for name, child, inner in module.children(shape):
        x = translate(place.at(name), child, x, inner)
    return x


def residual(place: Place, module: nn.Residual, x: str, shape: nn.Shape) -> str:
    body, *shortcut = _children(place, module, x, shape)
    return place.op("Add", body, *(shortcut or [x]))


def concat(place: Place, module: nn.Concat, x: str, shape: nn.Shape) -> str:
    return place.op("Concat", *_children(place, module, x, shape), axis=1)


def add(place: Place, module: nn.Add, x: str, shape: nn.Shape) -> str:
    return place.op("Sum", *_children(place, module, x, shape))


def _children(place: Place, module: nn.Container, x: str, shape: nn.Shape) -> list[str]:
    return [translate(place.at(name), child, x, inner) for name, child, inner in module.children(shape)]


TRANSLATIONS: dict[type[nn.Module], Translation] = {
    nn.Linear: linear,
    nn.Conv2d: conv2d,
    nn.ConvTranspose2d: conv_transpose2d,
    nn.MaxPool2d: max_pool2d,
    nn.AvgPool2d: avg_pool2d,
    nn.AdaptiveAvgPool2d: adaptive_avg_pool2d,
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
    nn.LayerNorm: layer_norm,
    nn.GroupNorm: group_norm,
    nn.Embedding: embedding,
    nn.Dropout: dropout,
    nn.Flatten: flatten,
    nn.Reshape: reshape,
    nn.Relu: same("Relu"),
    nn.LeakyRelu: leaky_relu,
    nn.Elu: elu,
    nn.Gelu: gelu,
    nn.Silu: silu,
    nn.Tanh: same("Tanh"),
    nn.Sigmoid: same("Sigmoid"),
    nn.Softplus: same("Softplus"),
    nn.Softmax: over_axis("Softmax"),
    nn.LogSoftmax: over_axis("LogSoftmax"),
    nn.Sequential: sequential,
    nn.Residual: residual,
    nn.Concat: concat,
    nn.Add: add,
}
"""How each kind of module is written; `nn.Add` and its like are in here beside the layers of `nn.LAYERS`."""
