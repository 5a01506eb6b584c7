"""Layers in plain NumPy, with derivatives written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from adtrain import nn
from adtrain.backends.cpu import naive
from adtrain.bench.peers.layers import Arrays, unsupported
from adtrain.nn.fields import pair

Pull: TypeAlias = Callable[[Any], tuple[Any, Arrays]]
"""From the gradient of the output to that of the input, and those of the parameters by path."""

Forward: TypeAlias = Callable[[Arrays, Any], tuple[Any, Pull]]
"""(arrays, x (N, ...)) to the output (N, ...) and its `Pull`."""


class Kit(NamedTuple):
    """Implementations of matrix products, and of convolutions with their pullback; see `convolved`."""

    product: Callable[[Any, Any], Any]
    convolved: Callable[..., tuple[Any, Callable[[Any], tuple[Any, Any]]]]


def model(layers: nn.Module, kit: Kit) -> Forward:
    """The model, a sequence of layers.

    Raises:
        Unsupported: a layer has no counterpart here.
    """
    assert isinstance(layers, nn.Sequential)
    parts = [_layer(layer, f"{i}.", kit) for i, layer in enumerate(layers.layers)]

    def forward(arrays: Arrays, x: Any) -> tuple[Any, Pull]:
        pulls = []
        for part in parts:
            x, pull = part(arrays, x)
            pulls.append(pull)

        def back(ct: Any) -> tuple[Any, Arrays]:
            grads: Arrays = {}
            for pull in reversed(pulls):
                ct, found = pull(ct)
                grads |= found
            return ct, grads

        return x, back

    return forward


def _layer(layer: nn.Module, path: str, kit: Kit) -> Forward:
    """One layer; `path` is the prefix of the paths of its arrays."""
    match layer:
        case nn.Linear():
            return lambda arrays, x: _linear(kit, arrays, path, x)
        case nn.Conv2d(groups=1, dilation=1) if layer.padding != "same":
            return lambda arrays, x: _conv2d(layer, kit, arrays, path, x)
        case nn.MaxPool2d(padding=0) if layer.stride in (None, layer.kernel_size):
            return lambda arrays, x: _max_pool(pair(layer.kernel_size), x)
        case nn.ReLU():
            return lambda arrays, x: (np.maximum(x, 0), lambda ct: (ct * (x > 0), {}))
        case nn.Tanh():
            return lambda arrays, x: _by_output(np.tanh(x), lambda y: 1 - y * y)
        case nn.Sigmoid():
            return lambda arrays, x: _by_output(1 / (1 + np.exp(-x)), lambda y: y * (1 - y))
        case nn.Flatten():
            return lambda arrays, x: (x.reshape(len(x), -1), lambda ct: (ct.reshape(x.shape), {}))
    unsupported("plain NumPy", layer.kind())


def _by_output(y: Any, slope: Callable[[Any], Any]) -> tuple[Any, Pull]:
    return y, lambda ct: (ct * slope(y), {})


def _with_bias(arrays: Arrays, path: str, y: Any, pull_both: Callable[[Any], tuple[Any, Any]]) -> tuple[Any, Pull]:
    """A product (N, C, ...) of an input and a weight plus the bias, if there is one; `pull_both` is the product's."""
    bias, axes = arrays.get(f"{path}bias"), (0, *range(2, y.ndim))

    def pull(ct: Any) -> tuple[Any, Arrays]:
        by_x, by_weight = pull_both(ct)
        return by_x, {f"{path}weight": by_weight, **({} if bias is None else {f"{path}bias": ct.sum(axes)})}

    return (y if bias is None else y + bias.reshape(-1, *[1] * (y.ndim - 2))), pull


def _linear(kit: Kit, arrays: Arrays, path: str, x: Any) -> tuple[Any, Pull]:
    weight = arrays[f"{path}weight"]
    pull_both = lambda ct: (kit.product(ct, weight), kit.product(ct.T, x))  # noqa: E731
    return _with_bias(arrays, path, kit.product(x, weight.T), pull_both)


def _conv2d(layer: nn.Conv2d, kit: Kit, arrays: Arrays, path: str, x: Any) -> tuple[Any, Pull]:
    padding: Any = layer.padding
    product = kit.convolved(x, arrays[f"{path}weight"], pair(layer.stride), pair(padding))
    return _with_bias(arrays, path, *product)


def convolved(
    x: Any, weight: Any, stride: tuple[int, int], padding: tuple[int, int]
) -> tuple[Any, Callable[[Any], tuple[Any, Any]]]:
    """The convolution of x (N, C, H, W) with weight (O, C, kh, kw) by a matrix product with the column matrix (im2col),
    and its pullback to (x, weight)."""
    (n, channels, height, width), (out, _, kh, kw), (sh, sw), (ph, pw) = x.shape, weight.shape, stride, padding
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    windows = sliding_window_view(padded, (kh, kw), (2, 3))[:, :, ::sh, ::sw]
    high, wide = windows.shape[2:4]
    columns = windows.transpose(0, 2, 3, 1, 4, 5).reshape(n * high * wide, -1)
    kernel = weight.reshape(out, -1)
    y = (columns @ kernel.T).reshape(n, high, wide, out).transpose(0, 3, 1, 2)

    def pull(ct: Any) -> tuple[Any, Any]:
        rows = ct.transpose(0, 2, 3, 1).reshape(-1, out)
        by_columns = (rows @ kernel).reshape(n, high, wide, channels, kh, kw).transpose(0, 3, 4, 5, 1, 2)
        by_padded = np.zeros_like(padded)
        for i in range(kh):
            for j in range(kw):
                by_padded[:, :, i : i + sh * high : sh, j : j + sw * wide : sw] += by_columns[:, :, i, j]
        return by_padded[:, :, ph : ph + height, pw : pw + width], (rows.T @ columns).reshape(weight.shape)

    return y, pull


def _max_pool(kernel: tuple[int, int], x: Any) -> tuple[Any, Pull]:
    kh, kw = kernel
    n, channels, height, width = x.shape[0], x.shape[1], x.shape[2] // kh, x.shape[3] // kw
    whole = x[:, :, : height * kh, : width * kw]
    blocks = whole.reshape(n, channels, height, kh, width, kw).transpose(0, 1, 2, 4, 3, 5)
    flat = blocks.reshape(n, channels, height, width, kh * kw)
    at = flat.argmax(-1)[..., None]

    def pull(ct: Any) -> tuple[Any, Arrays]:
        by_flat = np.zeros_like(flat)
        np.put_along_axis(by_flat, at, ct[..., None], -1)
        by_x = np.zeros_like(x)
        by_blocks = by_flat.reshape(blocks.shape).transpose(0, 1, 2, 4, 3, 5)
        by_x[:, :, : height * kh, : width * kw] = by_blocks.reshape(whole.shape)
        return by_x, {}

    return np.take_along_axis(flat, at, -1)[..., 0], pull


PLAIN = Kit(np.matmul, convolved)


def naive_product(a: Any, b: Any) -> Any:
    """a @ b in float32, by a naive loop. A transposed view is passed as its base with a flag, without a copy."""
    transposed = [x.flags.f_contiguous and not x.flags.c_contiguous for x in (a, b)]
    return naive.matmul(*(x.T if flag else x for x, flag in zip((a, b), transposed, strict=True)), *transposed)


def naive_convolved(
    x: Any, weight: Any, stride: tuple[int, int], padding: tuple[int, int]
) -> tuple[Any, Callable[[Any], tuple[Any, Any]]]:
    """As `convolved`, by a naive loop, without a column matrix."""
    sizes = naive.conv_sizes(x.shape, weight.shape, stride, padding)
    n, out, high, wide = sizes[0], sizes[4], *sizes[7:9]

    def pull(ct: Any) -> tuple[Any, Any]:
        by_x = naive.call("conv2d_input_grad", x.shape, ct, weight, *sizes)
        return by_x, naive.call("conv2d_weight_grad", weight.shape, x, ct, *sizes)

    return naive.call("conv2d", (n, out, high, wide), x, weight, *sizes), pull
