"""The translation of each layer, in evaluation mode, to calls of C functions: one function per class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from math import prod
from typing import Any

import numpy as np

from adtrain import nn
from adtrain.export.c.recurrent import recurrent
from adtrain.export.c.writer import CONV, POOL, Buffer, Name, Part, Writer, describe, refuse, struct, vectors_of_filters
from adtrain.nn.fields import pair
from adtrain.nn.tokens import sinusoids

Translation = Callable[[Writer, Any, Buffer, nn.Shape], Buffer]
"""(writer, layer, input, shape of an input sample) to the output."""


def translate(writer: Writer, module: nn.Module, x: Buffer, shape: nn.Shape) -> Buffer:
    """Add a module with the input `x` of `shape` and return its output.

    Raises AdtrainError, which names the layer, for a layer of a plug-in.
    """
    if type(module) not in TRANSLATIONS:
        raise refuse(writer.path, module, "is a layer of a plug-in, for which there is no C")
    if not isinstance(module, nn.Container):
        describe(writer, module, shape)
    return TRANSLATIONS[type(module)](writer, module, x, shape)


def linear(writer: Writer, layer: nn.Linear, x: Buffer, shape: nn.Shape) -> Buffer:
    rows = prod(shape[:-1])
    arrays = writer.matrix("weight"), writer.weight("bias")
    return writer.call("linear", x, rows, shape[-1], layer.out_features, *arrays, size=rows * layer.out_features)


def conv2d(writer: Writer, layer: nn.Conv2d, x: Buffer, shape: nn.Shape) -> Buffer:
    output = layer.output_shape(shape)
    x, shape = padded(writer, layer, x, shape)
    weight, function = writer.trained("weight"), "conv2d"
    if writer.simd and layer.groups == 1:
        weight, function = vectors_of_filters(weight), "conv2d_vectors"
    sizes = conv_sizes(layer, shape, output, (0, 0))
    arrays = writer.constant("weight", weight), writer.weight("bias")
    return writer.call(function, sizes, x, *arrays, size=prod(output))


def padded(writer: Writer, layer: nn.Conv2d, x: Buffer, shape: nn.Shape) -> tuple[Buffer, nn.Shape]:
    """The input of a convolution with its borders of zeros, and its shape."""
    (top, left), extra = layer.paddings()
    bottom, right = top + extra[0], left + extra[1]
    channels, height, width = shape
    if not any((top, left, bottom, right)):
        return x, shape
    larger = (channels, height + top + bottom, width + left + right)
    return writer.call("pad", x, *shape, top, left, bottom, right, out=Buffer(prod(larger), x.itemsize)), larger


def conv_transpose2d(writer: Writer, layer: nn.ConvTranspose2d, x: Buffer, shape: nn.Shape) -> Buffer:
    output = layer.output_shape(shape)
    sizes = conv_sizes(layer, shape, output, pair(layer.padding))
    return writer.call("conv_transpose2d", sizes, x, writer.weight("weight"), writer.weight("bias"), size=prod(output))


def conv_sizes(
    layer: nn.Conv2d | nn.ConvTranspose2d, shape: nn.Shape, output: nn.Shape, padding: tuple[int, int]
) -> Name:
    """A struct conv as C text."""
    sizes = (
        *(*shape, output[0], layer.groups, *output[1:]),
        *(*pair(layer.kernel_size), *pair(layer.stride), *pair(layer.dilation), *padding),
    )
    return struct("conv", CONV, sizes)


def pooling(function: str) -> Translation:
    def write(writer: Writer, layer: nn.MaxPool2d | nn.AvgPool2d, x: Buffer, shape: nn.Shape) -> Buffer:
        output = layer.output_shape(shape)
        return writer.call(function, pool_sizes(layer, shape), x, size=prod(output))

    return write


def pool_sizes(layer: nn.MaxPool2d | nn.AvgPool2d, shape: nn.Shape) -> Name:
    """A struct pool as C text."""
    stride = layer.kernel_size if layer.stride is None else layer.stride
    output = layer.output_shape(shape)
    sizes = (*shape, *output[1:], *pair(layer.kernel_size), *pair(stride), *pair(layer.padding))
    return struct("pool", POOL, sizes)


def adaptive_avg_pool2d(writer: Writer, layer: nn.AdaptiveAvgPool2d, x: Buffer, shape: nn.Shape) -> Buffer:
    sizes = pair(layer.output_size)
    return writer.call("adaptive_avg_pool2d", x, *shape, *sizes, size=shape[0] * prod(sizes))


def batch_norm(writer: Writer, layer: nn.BatchNorm1d | nn.BatchNorm2d, x: Buffer, shape: nn.Shape) -> Buffer:
    if writer.program.training:
        given = [writer.weight(name) for name in ("running_mean", "running_var", "weight", "bias")]
        sizes = shape[0], prod(shape[1:]), float(layer.eps)
        return writer.call("batch_norm", x, *sizes, *given, size=prod(shape), in_place=True)
    factor, summand = factor_and_summand(writer, layer)
    arrays = writer.constant("factor", factor), writer.constant("summand", summand)
    return writer.call("scale_channels", x, shape[0], prod(shape[1:]), *arrays, size=prod(shape), in_place=True)


def factor_and_summand(writer: Writer, layer: nn.BatchNorm1d | nn.BatchNorm2d) -> tuple[np.ndarray, np.ndarray]:
    """What a batch normalisation in evaluation multiplies each channel by and adds to it, in float64."""
    mean, variance = (writer.trained(name).astype(np.float64) for name in ("running_mean", "running_var"))
    factor = 1 / np.sqrt(variance + layer.eps)
    if not layer.affine:
        return factor, -mean * factor
    factor = factor * writer.trained("weight")
    return factor, writer.trained("bias") - mean * factor


def layer_norm(writer: Writer, layer: nn.LayerNorm, x: Buffer, shape: nn.Shape) -> Buffer:
    axes = len(layer.normalized_shape) if isinstance(layer.normalized_shape, tuple) else 1
    rows, n = prod(shape[:-axes]), prod(shape[-axes:])
    arrays = writer.weight("weight"), writer.weight("bias")
    return writer.call("layer_norm", x, rows, n, float(layer.eps), *arrays, size=prod(shape), in_place=True)


def group_norm(writer: Writer, layer: nn.GroupNorm, x: Buffer, shape: nn.Shape) -> Buffer:
    sizes = layer.num_groups, shape[0], prod(shape[1:])
    arrays = writer.weight("weight"), writer.weight("bias")
    return writer.call("group_norm", x, *sizes, float(layer.eps), *arrays, size=prod(shape), in_place=True)


def embedding(writer: Writer, layer: nn.Embedding, x: Buffer, shape: nn.Shape) -> Buffer:
    sizes = prod(shape), layer.num_embeddings, layer.embedding_dim
    size = prod(shape) * layer.embedding_dim
    return writer.call("embedding", x, *sizes, writer.weight("weight"), size=size, checked=True)


def select(writer: Writer, layer: nn.Select, x: Buffer, shape: nn.Shape) -> Buffer:
    n = prod(shape[1:])
    indices = writer.constant("indices", np.array(layer.indices))
    return writer.call("take_channels", x, indices, len(layer.indices), n, size=len(layer.indices) * n)


def activation(function: str) -> Translation:
    """The translation to a function of each number; its arguments after n are the layer's options."""

    def write(writer: Writer, layer: nn.Module, x: Buffer, shape: nn.Shape) -> Buffer:
        options = map(float, astuple(layer))  # type: ignore[call-overload]
        return writer.call(function, x, prod(shape), *options, size=prod(shape), in_place=True)

    return write


def gelu(writer: Writer, layer: nn.GELU, x: Buffer, shape: nn.Shape) -> Buffer:
    function = "gelu" if layer.approximate == "none" else "gelu_tanh"
    return writer.call(function, x, prod(shape), size=prod(shape), in_place=True)


def along_axis(function: str) -> Translation:
    def write(writer: Writer, layer: nn.Softmax | nn.LogSoftmax, x: Buffer, shape: nn.Shape) -> Buffer:
        return writer.call(function, x, *lines(layer.dim, shape), size=prod(shape), in_place=True)

    return write


def lines(dim: int, shape: nn.Shape) -> tuple[int, int, int]:
    """A sample as (rows, n, columns), n being along the axis `dim`; axis 0 is the batch."""
    axis = dim % (len(shape) + 1) - 1
    return prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :])


def mean(writer: Writer, layer: nn.Mean, x: Buffer, shape: nn.Shape) -> Buffer:
    return writer.call("mean", x, *lines(layer.dim, shape), size=prod(layer.output_shape(shape)))


def multihead_attention(writer: Writer, layer: nn.MultiheadAttention, x: Buffer, shape: nn.Shape) -> Buffer:
    tokens, width = shape
    in_proj = writer.matrix("in_proj_weight"), writer.weight("in_proj_bias")
    out_proj = writer.matrix("out_proj.weight"), writer.weight("out_proj.bias")
    x = writer.call("linear", x, tokens, width, 3 * width, *in_proj, size=3 * tokens * width)
    sizes = tokens, width, layer.num_heads, int(layer.causal)
    x = writer.call("attention", x, *sizes, size=tokens * width, scratch=tokens)
    return writer.call("linear", x, tokens, width, width, *out_proj, size=tokens * width)


def transformer_encoder_layer(writer: Writer, layer: nn.TransformerEncoderLayer, x: Buffer, shape: nn.Shape) -> Buffer:
    children = {name: (child, inner) for name, child, inner in layer.children(shape)}
    size = prod(shape)

    def run(name: str, x: Buffer) -> Buffer:
        return translate(writer.child(name), children[name][0], x, children[name][1])

    def feed_forward(x: Buffer) -> Buffer:
        n = prod(children["linear2"][1])
        return run("linear2", writer.call(layer.activation, run("linear1", x), n, size=n, in_place=True))

    def sum_of(x: Buffer, y: Buffer) -> Buffer:
        return writer.call("add", y, x, size, size=size, in_place=True)

    if layer.norm_first:
        x = sum_of(x, run("self_attn", run("norm1", x)))
        return sum_of(x, feed_forward(run("norm2", x)))
    x = run("norm1", sum_of(x, run("self_attn", x)))
    return run("norm2", sum_of(x, feed_forward(x)))


def positional_embedding(writer: Writer, layer: nn.PositionalEmbedding, x: Buffer, shape: nn.Shape) -> Buffer:
    learned = layer.encoding == "learned"
    table = writer.weight("weight") if learned else writer.constant("sinusoids", sinusoids(*shape))
    return writer.call("add", x, table, prod(shape), size=prod(shape), in_place=True)


def patches(writer: Writer, layer: nn.Patches, x: Buffer, shape: nn.Shape) -> Buffer:
    return writer.call("patches", x, *shape, *pair(layer.patch_size), size=prod(shape))


def same(writer: Writer, layer: nn.Module, x: Buffer, shape: nn.Shape) -> Buffer:
    return x


def sequential(writer: Writer, module: nn.Sequential, x: Buffer, shape: nn.Shape) -> Buffer:
    for name, child, inner in module.children(shape):
        x = translate(writer.child(name), child, x, inner)
    return x


def residual(writer: Writer, module: nn.Residual, x: Buffer, shape: nn.Shape) -> Buffer:
    body, *shortcut = _children(writer, module, x, shape)
    return _sum(writer, body, (shortcut or [x])[0])


def add(writer: Writer, module: nn.Add, x: Buffer, shape: nn.Shape) -> Buffer:
    first, *others = _children(writer, module, x, shape)
    for other in others:
        first = _sum(writer, first, other)
    return first


def _sum(writer: Writer, a: Buffer, b: Buffer) -> Buffer:
    writer.comment(f"{'.'.join(writer.path)} sum")
    return writer.call("add", a, b, a.size, size=a.size, in_place=True)


def concat(writer: Writer, module: nn.Concat, x: Buffer, shape: nn.Shape) -> Buffer:
    branches = _children(writer, module, x, shape)
    writer.comment(f"{'.'.join(writer.path)} concat")
    y, start = Buffer(sum(branch.size for branch in branches)), 0
    for branch in branches:
        writer.call("copy", branch, branch.size, out=Part(y, start))
        start += branch.size
    return y


def _children(writer: Writer, module: nn.Container, x: Buffer, shape: nn.Shape) -> list[Buffer]:
    return [translate(writer.child(name), child, x, inner) for name, child, inner in module.children(shape)]


TRANSLATIONS: dict[type[nn.Module], Translation] = {
    nn.Linear: linear,
    nn.Conv2d: conv2d,
    nn.ConvTranspose2d: conv_transpose2d,
    nn.MaxPool2d: pooling("max_pool2d"),
    nn.AvgPool2d: pooling("avg_pool2d"),
    nn.AdaptiveAvgPool2d: adaptive_avg_pool2d,
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
    nn.LayerNorm: layer_norm,
    nn.GroupNorm: group_norm,
    nn.Embedding: embedding,
    nn.RNN: recurrent,
    nn.LSTM: recurrent,
    nn.GRU: recurrent,
    nn.Dropout: same,
    nn.Flatten: same,
    nn.Reshape: same,
    nn.Select: select,
    nn.ReLU: activation("relu"),
    nn.LeakyReLU: activation("leaky_relu"),
    nn.ELU: activation("elu"),
    nn.GELU: gelu,
    nn.SiLU: activation("silu"),
    nn.Tanh: activation("hyperbolic_tangent"),
    nn.Sigmoid: activation("sigmoid"),
    nn.Softplus: activation("softplus"),
    nn.Softmax: along_axis("softmax"),
    nn.LogSoftmax: along_axis("log_softmax"),
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
