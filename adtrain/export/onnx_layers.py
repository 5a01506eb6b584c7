"""The translation of each layer, in evaluation mode, to ONNX nodes: one function per layer class, in one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import pi, prod, sqrt
from typing import Any

import numpy as np

from adtrain import nn
from adtrain.core.errors import AdtrainError
from adtrain.export.onnx_graph import LayerWriter
from adtrain.export.onnx_recurrent import recurrent
from adtrain.nn.fields import pair
from adtrain.nn.tokens import sinusoids
from adtrain.ops.attention import EXCLUDED
from adtrain.ops.pool import averages

INT64 = 7
"""The number of int64 in onnx.TensorProto.DataType."""

Translation = Callable[[LayerWriter, Any, str, nn.Shape], str]
"""(writer, layer, name of the input, shape of an input sample) to the name of the output."""


def translate(writer: LayerWriter, module: nn.Module, x: str, shape: nn.Shape) -> str:
    """Add a module with the input `x`, (N, *shape), to the graph and return the name of its output.

    Weights are written as float32. Raises AdtrainError for a layer of a plug-in.
    """
    if type(module) not in TRANSLATIONS:
        raise AdtrainError(
            f"layer {'.'.join(writer.path)}: ONNX has no {module.kind()}, a layer of a plug-in; "
            "FILE.safetensors holds the weights of any run"
        )
    return TRANSLATIONS[type(module)](writer, module, x, shape)


def linear(writer: LayerWriter, layer: nn.Linear, x: str, shape: nn.Shape) -> str:
    weight, bias = writer.weight("weight"), [writer.weight("bias")] if layer.bias else []
    if len(shape) == 1:
        return writer.op("Gemm", x, weight, *bias, transB=1)
    return _product(writer, x, weight, bias)


def _product(writer: LayerWriter, x: str, weight: str, bias: Sequence[str]) -> str:
    """x weightᵀ + bias for an `x` of any number of axes; no or one bias."""
    y = writer.op("MatMul", x, writer.op("Transpose", weight, perm=[1, 0]))
    return writer.op("Add", y, *bias) if bias else y


def conv2d(writer: LayerWriter, layer: nn.Conv2d, x: str, shape: nn.Shape) -> str:
    low, extra = layer.paddings()
    high = tuple(p + e for p, e in zip(low, extra, strict=True))
    return _convolution("Conv", writer, layer, x, pads=[*low, *high])


def conv_transpose2d(writer: LayerWriter, layer: nn.ConvTranspose2d, x: str, shape: nn.Shape) -> str:
    pads = pair(layer.padding) * 2
    return _convolution("ConvTranspose", writer, layer, x, pads=pads, output_padding=pair(layer.output_padding))


def _convolution(op: str, writer: LayerWriter, layer: nn.Conv2d | nn.ConvTranspose2d, x: str, **more: Any) -> str:
    arrays = [writer.weight(name) for name in ("weight", "bias") if name == "weight" or layer.bias]
    sizes = {"kernel_shape": layer.kernel_size, "strides": layer.stride, "dilations": layer.dilation}
    pairs = {name: pair(size) for name, size in sizes.items()}
    return writer.op(op, x, *arrays, **pairs, group=layer.groups, **more)


def max_pool2d(writer: LayerWriter, layer: nn.MaxPool2d, x: str, shape: nn.Shape) -> str:
    return writer.op("MaxPool", x, **_windows(layer))


def avg_pool2d(writer: LayerWriter, layer: nn.AvgPool2d, x: str, shape: nn.Shape) -> str:
    return writer.op("AveragePool", x, **_windows(layer), count_include_pad=1)


def _windows(layer: nn.MaxPool2d | nn.AvgPool2d) -> dict[str, tuple[int, ...]]:
    kernel = pair(layer.kernel_size)
    stride = kernel if layer.stride is None else pair(layer.stride)
    return {"kernel_shape": kernel, "strides": stride, "pads": pair(layer.padding) * 2}


def adaptive_avg_pool2d(writer: LayerWriter, layer: nn.AdaptiveAvgPool2d, x: str, shape: nn.Shape) -> str:
    sizes = pair(layer.output_size)
    if sizes == (1, 1):
        return writer.op("GlobalAveragePool", x)
    rows, columns = (averages(n, count) for n, count in zip(shape[1:], sizes, strict=True))
    means = writer.op("MatMul", writer.constant("rows", rows), x)
    return writer.op("MatMul", means, writer.constant("columns", columns.T))


def batch_norm(writer: LayerWriter, layer: nn.BatchNorm1d | nn.BatchNorm2d, x: str, shape: nn.Shape) -> str:
    scale, shift = _scale_and_shift(writer, layer.affine, shape[:1])
    statistics = writer.weight("running_mean"), writer.weight("running_var")
    return writer.op("BatchNormalization", x, scale, shift, *statistics, epsilon=layer.eps)


def layer_norm(writer: LayerWriter, layer: nn.LayerNorm, x: str, shape: nn.Shape) -> str:
    axes = len(layer.normalized_shape) if isinstance(layer.normalized_shape, tuple) else 1
    scale, shift = _scale_and_shift(writer, layer.elementwise_affine, shape[-axes:])
    return writer.op("LayerNormalization", x, scale, shift, axis=-axes, epsilon=layer.eps)


def group_norm(writer: LayerWriter, layer: nn.GroupNorm, x: str, shape: nn.Shape) -> str:
    """Instance normalisation with each group as one channel; weight and bias are applied per channel afterwards."""
    grouped = writer.reshape("groups", x, (layer.num_groups, prod(shape) // layer.num_groups))
    ones_and_zeros = _scale_and_shift(writer, False, (layer.num_groups,))
    y = writer.op("InstanceNormalization", grouped, *ones_and_zeros, epsilon=layer.eps)
    y = writer.reshape("shape", y, shape)
    if not layer.affine:
        return y
    per_channel = writer.constant("per_channel", [-1, *[1] * (len(shape) - 1)])
    scale, shift = (writer.op("Reshape", writer.weight(name), per_channel) for name in ("weight", "bias"))
    return writer.op("Add", writer.op("Mul", y, scale), shift)


def _scale_and_shift(writer: LayerWriter, affine: bool, shape: nn.Shape) -> tuple[str, str]:
    """A layer's weight and bias, or ones and zeros if it has none, because ONNX requires both."""
    if affine:
        return writer.weight("weight"), writer.weight("bias")
    return writer.constant("ones", np.ones(shape)), writer.constant("zeros", np.zeros(shape))


def embedding(writer: LayerWriter, layer: nn.Embedding, x: str, shape: nn.Shape) -> str:
    return writer.op("Gather", writer.weight("weight"), writer.op("Cast", x, to=INT64), axis=0)


def select(writer: LayerWriter, layer: nn.Select, x: str, shape: nn.Shape) -> str:
    return writer.op("Gather", x, writer.constant("indices", layer.indices), axis=1)


def reshape(writer: LayerWriter, layer: nn.Reshape, x: str, shape: nn.Shape) -> str:
    return writer.reshape("shape", x, layer.output_shape(shape))


def gelu(writer: LayerWriter, layer: nn.GELU, x: str, shape: nn.Shape) -> str:
    """x (1 + f(x)) / 2, where f is erf(x / √2) or a tanh of a cubic."""
    half, one = writer.constant("half", 0.5), writer.constant("one", 1.0)
    if layer.approximate == "none":
        y = writer.op("Erf", writer.op("Mul", x, writer.constant("sqrt_half", sqrt(0.5))))
    else:
        cube = writer.op("Mul", writer.op("Mul", writer.op("Mul", x, x), x), writer.constant("cubic", 0.044715))
        y = writer.op("Mul", writer.op("Add", x, cube), writer.constant("scale", sqrt(2 / pi)))
        y = writer.op("Tanh", y)
    return writer.op("Mul", writer.op("Mul", x, half), writer.op("Add", y, one))


def operator(op: str, **fields: str) -> Translation:
    """The translation to one ONNX operator. `fields` maps its attributes to fields of the layer."""
    return lambda writer, layer, x, shape: writer.op(op, x, **{name: getattr(layer, f) for name, f in fields.items()})


def multihead_attention(writer: LayerWriter, layer: nn.MultiheadAttention, x: str, shape: nn.Shape) -> str:
    (tokens, width), heads = shape, layer.num_heads
    head = width // heads

    def projection(x: str, prefix: str) -> str:
        bias = [writer.weight(f"{prefix}bias")] if layer.bias else []
        return _product(writer, x, writer.weight(f"{prefix}weight"), bias)

    by_head = writer.reshape("heads", projection(x, "in_proj_"), (tokens, 3, heads, head))
    parts = writer.op("Transpose", by_head, perm=[2, 0, 3, 1, 4])
    q, k, v = (writer.op("Gather", parts, writer.constant(name, i), axis=0) for i, name in enumerate(("q", "k", "v")))
    q = writer.op("Mul", q, writer.constant("scale", 1 / sqrt(head)))
    scores = writer.op("MatMul", q, writer.op("Transpose", k, perm=[0, 1, 3, 2]))
    if layer.causal:
        scores = writer.op("Add", scores, writer.constant("causal", np.triu(np.full((tokens, tokens), EXCLUDED), 1)))
    joined = writer.op("Transpose", writer.op("MatMul", writer.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
    return projection(writer.reshape("joined", joined, shape), "out_proj.")


def transformer_encoder_layer(writer: LayerWriter, layer: nn.TransformerEncoderLayer, x: str, shape: nn.Shape) -> str:
    children = {name: (child, inner) for name, child, inner in layer.children(shape)}

    def run(name: str, x: str) -> str:
        return translate(writer.child(name), children[name][0], x, children[name][1])

    def feed_forward(x: str) -> str:
        activation = {"relu": nn.ReLU(), "gelu": nn.GELU()}[layer.activation]
        return run("linear2", translate(writer, activation, run("linear1", x), children["linear2"][1]))

    if layer.norm_first:
        x = writer.op("Add", x, run("self_attn", run("norm1", x)))
        return writer.op("Add", x, feed_forward(run("norm2", x)))
    x = run("norm1", writer.op("Add", x, run("self_attn", x)))
    return run("norm2", writer.op("Add", x, feed_forward(x)))


def positional_embedding(writer: LayerWriter, layer: nn.PositionalEmbedding, x: str, shape: nn.Shape) -> str:
    learned = layer.encoding == "learned"
    return writer.op("Add", x, writer.weight("weight") if learned else writer.constant("sinusoids", sinusoids(*shape)))


def patches(writer: LayerWriter, layer: nn.Patches, x: str, shape: nn.Shape) -> str:
    (channels, rows, columns), (height, width) = shape, pair(layer.patch_size)
    split = writer.reshape("split", x, (channels, rows // height, height, columns // width, width))
    return writer.reshape("shape", writer.op("Transpose", split, perm=[0, 2, 4, 1, 3, 5]), layer.output_shape(shape))


def mean(writer: LayerWriter, layer: nn.Mean, x: str, shape: nn.Shape) -> str:
    return writer.op("ReduceMean", x, axes=[layer.dim], keepdims=0)


def sequential(writer: LayerWriter, module: nn.Sequential, x: str, shape: nn.Shape) -> str:
    for name, child, inner in module.children(shape):
        x = translate(writer.child(name), child, x, inner)
    return x


def residual(writer: LayerWriter, module: nn.Residual, x: str, shape: nn.Shape) -> str:
    body, *shortcut = _children(writer, module, x, shape)
    return writer.op("Add", body, *(shortcut or [x]))


def concat(writer: LayerWriter, module: nn.Concat, x: str, shape: nn.Shape) -> str:
    return writer.op("Concat", *_children(writer, module, x, shape), axis=1)


def add(writer: LayerWriter, module: nn.Add, x: str, shape: nn.Shape) -> str:
    return writer.op("Sum", *_children(writer, module, x, shape))


def _children(writer: LayerWriter, module: nn.Container, x: str, shape: nn.Shape) -> list[str]:
    return [translate(writer.child(name), child, x, inner) for name, child, inner in module.children(shape)]


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
    nn.RNN: recurrent,
    nn.LSTM: recurrent,
    nn.GRU: recurrent,
    nn.Dropout: lambda writer, layer, x, shape: x,
    nn.Flatten: lambda writer, layer, x, shape: writer.op("Flatten", x, axis=1),
    nn.Reshape: reshape,
    nn.Select: select,
    nn.ReLU: operator("Relu"),
    nn.LeakyReLU: operator("LeakyRelu", alpha="negative_slope"),
    nn.ELU: operator("Elu", alpha="alpha"),
    nn.GELU: gelu,
    nn.SiLU: lambda writer, layer, x, shape: writer.op("Mul", x, writer.op("Sigmoid", x)),
    nn.Tanh: operator("Tanh"),
    nn.Sigmoid: operator("Sigmoid"),
    nn.Softplus: operator("Softplus"),
    nn.Softmax: operator("Softmax", axis="dim"),
    nn.LogSoftmax: operator("LogSoftmax", axis="dim"),
    nn.MultiheadAttention: multihead_attention,
    nn.TransformerEncoderLayer: transformer_encoder_layer,
    nn.PositionalEmbedding: positional_embedding,
    nn.Patches: patches,
    nn.Mean: mean,
    nn.Sequential: sequential,
    nn.Residual: residual,
    nn.Concat: concat,
    nn.Add: add,
}
"""The translation of each module class: the layers of `nn.LAYERS` and the containers."""
