"""Hypothesis strategies: layers with valid options for an input shape, networks of them, and their arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st

import adtrain as ad
from adtrain import config, nn
from adtrain.core import tree
from adtrain.core.errors import OptionError, ShapeError
from adtrain.data.statistics import PIXEL_MAX
from adtrain.training import TrainedModel, network

Strategy = st.SearchStrategy[Any]
small = st.integers(1, 3)
pairs = st.one_of(small, st.tuples(small, small))
pads = st.one_of(st.integers(0, 2), st.tuples(st.integers(0, 2), st.integers(0, 2)))
slopes = st.sampled_from([-0.5, 0.01, 0.3, 2.0])
epsilons = st.sampled_from([1e-3, 1e-2])
flags = st.booleans()
affine = st.sampled_from([True, False, "weight", "bias"])

images = st.tuples(st.integers(1, 6), st.integers(1, 7), st.integers(1, 7))
matrices = st.tuples(small, st.integers(1, 6))
samples = st.one_of(st.tuples(small), matrices, images)


def divisors(number: int) -> Strategy:
    return st.sampled_from([n for n in range(1, number + 1) if number % n == 0])


def conv2d(shape: nn.Shape) -> Strategy:
    ends = st.one_of(
        st.fixed_dictionaries({"stride": pairs, "padding": pads}),
        st.just({"padding": "same"}),
    )
    return st.builds(lambda options, ends: nn.Conv2d(**options, **ends), _convolution_options(shape), ends)


def conv_transpose2d(shape: nn.Shape) -> Strategy:
    ends = st.fixed_dictionaries({"stride": pairs, "padding": pads, "output_padding": pads})
    return st.builds(
        lambda options, ends: build(nn.ConvTranspose2d, **options, **ends), _convolution_options(shape), ends
    )


def conv1d(shape: nn.Shape) -> Strategy:
    ends = st.one_of(
        st.fixed_dictionaries({"stride": small, "padding": st.integers(0, 2)}),
        st.just({"padding": "same"}),
    )
    options = st.fixed_dictionaries({"kernel_size": small, "dilation": small, "bias": flags})
    return st.builds(
        lambda groups, per_group, options, ends: nn.Conv1d(groups * per_group, groups=groups, **options, **ends),
        divisors(shape[0]), small, options, ends,
    )  # fmt: skip


@st.composite
def _convolution_options(draw: st.DrawFn, shape: nn.Shape) -> dict[str, Any]:
    groups = draw(divisors(shape[0]))
    return {
        "out_channels": groups * draw(small),
        "groups": groups,
        **{name: draw(pairs) for name in ("kernel_size", "dilation")},
        "bias": draw(flags),
    }


def pooling(layer: type[nn.Module]) -> Callable[[nn.Shape], Strategy]:
    return lambda shape: st.builds(build, st.just(layer), pairs, stride=st.one_of(st.none(), pairs), padding=pads)


def adaptive_max_pool2d(shape: nn.Shape) -> Strategy:
    size = st.tuples(divisors(shape[1]), divisors(shape[2])) if len(shape) == 3 else st.just(1)
    return st.builds(nn.AdaptiveMaxPool2d, size)


def build(layer: type[nn.Module], *options: Any, **named: Any) -> nn.Module | None:
    """The layer; None if its options exclude one another."""
    try:
        return layer(*options, **named)
    except OptionError:
        return None


def reshapes(shape: nn.Shape) -> Strategy:
    size = prod(shape)
    return divisors(size).flatmap(
        lambda first: st.sampled_from([nn.Reshape((first, -1)), nn.Reshape((-1,)), nn.Reshape((1, size // first, -1))])
    )


def layer_norms(layer: type[nn.Module]) -> Callable[[nn.Shape], Strategy]:
    def norms(shape: nn.Shape) -> Strategy:
        ends = [None, shape[-1], *(shape[i:] for i in range(len(shape)))]
        return st.builds(layer, st.sampled_from(ends), eps=epsilons, elementwise_affine=flags)

    return norms


def plain(layer: type[nn.Module], *first: Strategy, **options: Strategy) -> Callable[[nn.Shape], Strategy]:
    return lambda shape: st.builds(layer, *first, **options)


def recurrent(layer: type[nn.Module], **options: Strategy) -> Callable[[nn.Shape], Strategy]:
    outputs = st.sampled_from(["last", "all"])
    return plain(layer, small, num_layers=small, bias=flags, bidirectional=flags, output=outputs, **options)


def over_axis(layer: type[nn.Module]) -> Callable[[nn.Shape], Strategy]:
    return lambda shape: st.builds(layer, st.sampled_from([n for i in range(len(shape)) for n in (i + 1, -i - 1)]))


def attention(shape: nn.Shape) -> Strategy:
    return st.builds(nn.MultiheadAttention, divisors(shape[-1]), bias=flags, causal=flags)


def decoder(shape: nn.Shape) -> Strategy:
    def made(heads: int, shared: bool, rotary: bool, **options: Any) -> nn.DecoderLayer:
        is_even = shape[-1] // heads % 2 == 0
        return nn.DecoderLayer(
            heads,
            num_key_value_heads=1 if shared else None,
            rotary_base=10.0 if rotary and is_even else None,
            **options,
        )

    return st.builds(
        made,
        divisors(shape[-1]),
        shared=flags,
        rotary=flags,
        dim_feedforward=small,
        norm=st.sampled_from(["layer_norm", "rms_norm"]),
        activation=st.sampled_from(list(nn.ACTIVATIONS)),
        bias=flags,
        norm_eps=epsilons,
        causal=flags,
        qk_norm=flags,
        window=st.sampled_from([None, 1, 2]),
        soft_cap=st.sampled_from([None, 5.0]),
    )


def transformer(shape: nn.Shape) -> Strategy:
    options = {"dim_feedforward": small, "layer_norm_eps": epsilons, "norm_first": flags, "causal": flags}
    activations = st.sampled_from(["relu", "gelu"])
    return st.builds(nn.TransformerEncoderLayer, divisors(shape[-1]), activation=activations, **options)


LAYERS: dict[type[nn.Module], Callable[[nn.Shape], Strategy]] = {
    nn.Linear: plain(nn.Linear, small, bias=flags),
    nn.Conv1d: conv1d,
    nn.Conv2d: conv2d,
    nn.ConvTranspose2d: conv_transpose2d,
    nn.MaxPool2d: pooling(nn.MaxPool2d),
    nn.AvgPool2d: pooling(nn.AvgPool2d),
    nn.AdaptiveAvgPool2d: plain(nn.AdaptiveAvgPool2d, pairs),
    nn.AdaptiveMaxPool2d: adaptive_max_pool2d,
    nn.Upsample: plain(nn.Upsample, pairs, mode=st.sampled_from(["nearest", "bilinear"])),
    nn.BatchNorm1d: lambda shape: st.builds(nn.BatchNorm1d, eps=epsilons, affine=affine),
    nn.BatchNorm2d: lambda shape: st.builds(nn.BatchNorm2d, eps=epsilons, affine=affine),
    nn.LayerNorm: layer_norms(nn.LayerNorm),
    nn.RMSNorm: layer_norms(nn.RMSNorm),
    nn.InstanceNorm2d: plain(nn.InstanceNorm2d, eps=epsilons, affine=flags),
    nn.GroupNorm: lambda shape: st.builds(nn.GroupNorm, divisors(shape[0]), eps=epsilons, affine=flags),
    nn.RNN: recurrent(nn.RNN, nonlinearity=st.sampled_from(["tanh", "relu"])),
    nn.LSTM: recurrent(nn.LSTM),
    nn.GRU: recurrent(nn.GRU),
    nn.Dropout: plain(nn.Dropout),
    nn.Dropout2d: plain(nn.Dropout2d),
    nn.Scale: plain(nn.Scale, slopes),
    nn.Flatten: plain(nn.Flatten),
    nn.Reshape: reshapes,
    nn.Select: lambda shape: st.lists(st.integers(0, shape[0] - 1), min_size=1, max_size=4).map(tuple).map(nn.Select),
    nn.MultiheadAttention: attention,
    nn.TransformerEncoderLayer: transformer,
    nn.DecoderLayer: decoder,
    nn.ClassToken: plain(nn.ClassToken),
    nn.PositionalEmbedding: plain(nn.PositionalEmbedding, st.sampled_from(["learned", "sinusoidal"])),
    nn.Patches: plain(nn.Patches, pairs),
    nn.Mean: over_axis(nn.Mean),
    nn.FourierFeatures: plain(nn.FourierFeatures, small, scale=st.floats(0.1, 0.5)),
    nn.Sine: plain(nn.Sine, small, omega=st.floats(1.0, 5.0), first=flags),
    nn.ReLU: plain(nn.ReLU),
    nn.SquaredReLU: plain(nn.SquaredReLU),
    nn.SoftCap: plain(nn.SoftCap, st.floats(0.5, 20.0)),
    nn.LeakyReLU: plain(nn.LeakyReLU, slopes),
    nn.PReLU: lambda shape: st.builds(nn.PReLU, st.sampled_from([1, shape[0]])),
    nn.Hardswish: plain(nn.Hardswish),
    nn.ELU: plain(nn.ELU, slopes),
    nn.GELU: plain(nn.GELU, st.sampled_from(["none", "tanh"])),
    nn.SiLU: plain(nn.SiLU),
    nn.Tanh: plain(nn.Tanh),
    nn.Sigmoid: plain(nn.Sigmoid),
    nn.Softplus: plain(nn.Softplus),
    nn.Softmax: over_axis(nn.Softmax),
    nn.LogSoftmax: over_axis(nn.LogSoftmax),
}
"""The layers of real numbers that all exports take: all but embedding and hash_grid."""


def fitting(kind: type[nn.Module], shape: nn.Shape) -> Strategy:
    """Layers of a kind that take samples of `shape`; None where the options drawn do not fit."""
    return LAYERS[kind](shape).map(lambda layer: layer if layer is not None and fits(layer, shape) else None)


def fits(layer: nn.Module, shape: nn.Shape) -> bool:
    try:
        layer.output_shape(shape)
    except ShapeError:
        return False
    return True


@st.composite
def networks(draw: st.DrawFn, shape: nn.Shape, depth: int = 2) -> nn.Sequential:
    """One to three layers, or containers of such networks, `depth` deep. All outputs have an axis."""
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 3))):
        nested = depth and draw(st.integers(0, 2)) == 0
        kind = draw(st.sampled_from(list(LAYERS)))
        layer = draw(containers(shape, depth - 1) if nested else fitting(kind, shape))
        output = () if layer is None else layer.output_shape(shape)
        if layer is not None and output and prod(output) < 2000:
            layers.append(layer)
            shape = output
    return nn.Sequential(*(layers or [nn.Tanh()]))


@st.composite
def containers(draw: st.DrawFn, shape: nn.Shape, depth: int) -> nn.Module:
    """A container of branches with the same output shape."""
    branch = draw(networks(shape, depth))
    same = branch.output_shape(shape) == shape
    kind = draw(st.sampled_from([nn.Concat, nn.Add, nn.Multiply, nn.Residual]))
    if kind is nn.Residual:
        return nn.Residual(branch, shortcut=None if same and draw(st.booleans()) else branch)
    return kind(branch, *([nn.Sequential(nn.Tanh())] if same else []), branch)


def with_arrays(
    model: nn.Sequential,
    shape: nn.Shape,
    seed: int = 0,
    loss: str = "cross_entropy",
    precision: str = "float32",
    scale: float = PIXEL_MAX,
) -> TrainedModel:
    """A trained model of that network. Its arrays are random, so that each one changes the output."""
    rng = np.random.default_rng(seed)
    image_shape = shape if len(shape) == 3 else (1, 1, prod(shape))
    cfg = _config(loss, precision)
    mean, std = (tuple(rng.uniform(0.2, 0.8, image_shape[0]).tolist()) for _ in range(2))
    net = replace(network.build(cfg, mean, std, scale, network.task_of(cfg, (), ())), model=model, input_shape=shape)
    params, statistics = (_drawn(each, rng) for each in model.init(shape, rng, net.dtype))
    return TrainedModel(cfg, net, params, statistics, ("one", "two"), image_shape)


@cache
def _config(loss: str, precision: str) -> config.Config:
    return config.load("smoke", [f"loss={loss}", f"training.precision={precision}"])


def _drawn(arrays: dict[str, Any], rng: np.random.Generator) -> Any:
    """The arrays with random values: biases and means are not 0, weights and variances are not 1."""
    found = []
    for name, x in zip(tree.paths(arrays), tree.leaves(arrays), strict=True):
        if name.endswith(("weight", "running_var")):
            drawn = x.numpy() * rng.uniform(0.5, 1.5, x.shape)
        else:
            drawn = rng.uniform(-1, 1, x.shape)
        found.append(ad.array(drawn.astype(x.dtype)))
    return tree.unflatten(tree.flatten(arrays)[1], found)


def some_images(trained: TrainedModel, count: int, seed: int = 0) -> np.ndarray:
    rng, shape = np.random.default_rng(seed), (count, *trained.image_shape)
    if trained.network.scale == 1:
        return rng.normal(size=shape).astype(np.float32)
    return rng.integers(0, 256, shape, dtype=np.uint8)
