"""A layer's output_shape, by which configs are checked without allocating, is the shape of its output."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adtrain as ad
from adtrain import nn
from adtrain.core.errors import OptionError, ShapeError

small = st.integers(1, 4)
pairs = st.one_of(small, st.tuples(small, small))
pads = st.one_of(st.integers(0, 2), st.tuples(st.integers(0, 2), st.integers(0, 2)))


def agrees(layer: nn.Module, shape: nn.Shape) -> bool:
    """Whether output_shape accepts `shape`; if it does, check that the layer's output and parameters agree with it."""
    try:
        expected = layer.output_shape(shape)
    except ShapeError:
        return False
    params, state = layer.init(shape, np.random.default_rng(0), np.dtype(np.float32))
    assert {name: x.shape for name, x in params.items()} == layer.parameter_shapes(shape)
    assert all(x.dtype == np.float32 for x in (params | state).values())
    x = ad.array(np.ones((2, *shape), np.float32))
    y, _ = layer.forward(params, state, x, nn.Mode(training=True))
    assert y.shape == (2, *expected)
    assert y.dtype == np.float32
    return True


@given(
    groups=st.integers(1, 3), channels=st.tuples(small, small), size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kernel=pairs, stride=pairs, padding=pads, dilation=pairs, bias=st.booleans(),
)  # fmt: skip
def test_conv2d_agrees_with_its_output_shape(
    groups: int, channels: tuple[int, int], size: tuple[int, int],
    kernel: Any, stride: Any, padding: Any, dilation: Any, bias: bool,
) -> None:  # fmt: skip
    layer = nn.Conv2d(
        groups * channels[1],
        kernel_size=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=bias,
    )
    shape = (groups * channels[0], *size)
    if not agrees(layer, shape):
        weight = np.ones((layer.out_channels, channels[0], *np.broadcast_to(kernel, 2)), np.float32)
        with pytest.raises(ShapeError):
            ad.ops.conv2d(np.ones((1, *shape), np.float32), weight, None, stride, padding, dilation, groups)


@given(channels=small, size=st.tuples(small, small), kernel=pairs, dilation=pairs)
def test_conv2d_with_same_padding_keeps_height_and_width(
    channels: int, size: tuple[int, int], kernel: Any, dilation: Any
) -> None:
    layer = nn.Conv2d(2, kernel_size=kernel, padding="same", dilation=dilation)
    assert agrees(layer, (channels, *size))
    assert layer.output_shape((channels, *size)) == (2, *size)


@given(
    groups=st.integers(1, 3), channels=st.tuples(small, small), size=st.tuples(small, small),
    kernel=pairs, stride=pairs, padding=pads, output_padding=pads, dilation=pairs,
)  # fmt: skip
def test_conv_transpose2d_agrees_with_its_output_shape(
    groups: int, channels: tuple[int, int], size: tuple[int, int],
    kernel: Any, stride: Any, padding: Any, output_padding: Any, dilation: Any,
) -> None:  # fmt: skip
    options = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
    try:
        layer = nn.ConvTranspose2d(groups * channels[1], kernel_size=kernel, groups=groups, **options)
    except OptionError:
        least = np.maximum(np.broadcast_to(stride, 2), np.broadcast_to(dilation, 2))
        assert (np.broadcast_to(output_padding, 2) >= least).any()
        return
    shape = (groups * channels[0], *size)
    if not agrees(layer, shape):
        weight = np.ones((shape[0], channels[1], *np.broadcast_to(kernel, 2)), np.float32)
        with pytest.raises(ShapeError):
            ad.ops.conv_transpose2d(np.ones((1, *shape), np.float32), weight, groups=groups, **options)


@given(
    kind=st.sampled_from([nn.MaxPool2d, nn.AvgPool2d]), size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    kernel=pairs, stride=st.one_of(st.none(), pairs), padding=pads,
)  # fmt: skip
def test_pooling_agrees_with_its_output_shape(
    kind: type, size: tuple[int, int], kernel: Any, stride: Any, padding: Any
) -> None:
    try:
        layer = kind(kernel, stride=stride, padding=padding)
    except OptionError:
        assert (2 * np.broadcast_to(padding, 2) > np.broadcast_to(kernel, 2)).any()
        return
    if not agrees(layer, (3, *size)):
        assert any(k > n + 2 * p for n, k, p in zip(size, *np.broadcast_arrays(kernel, padding, size)[:2], strict=True))


@given(size=st.tuples(small, small), output=pairs)
def test_adaptive_avg_pool2d_agrees_with_its_output_shape(size: tuple[int, int], output: Any) -> None:
    assert agrees(nn.AdaptiveAvgPool2d(output), (2, *size))


@given(
    layer=st.sampled_from([
        nn.Linear(3), nn.Linear(3, bias=False), nn.LayerNorm(), nn.GroupNorm(1), nn.Flatten(), nn.ReLU(),
        nn.LeakyReLU(), nn.ELU(), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Sigmoid(), nn.Softplus(), nn.Softmax(),
        nn.LogSoftmax(), nn.RMSNorm(), nn.PReLU(), nn.Hardswish(), nn.Scale(2.0),
        nn.Dropout(0.0), nn.Residual(nn.Tanh()), nn.Add(nn.ReLU(), nn.Tanh()),
    ]),
    shape=st.lists(small, min_size=1, max_size=4).map(tuple),
)  # fmt: skip
def test_layers_for_any_number_of_axes_agree_with_their_output_shape(layer: nn.Module, shape: nn.Shape) -> None:
    if isinstance(layer, nn.Container):
        y, _ = layer.forward({}, {}, ad.array(np.ones((2, *shape))), nn.Mode(training=True))
        assert y.shape == (2, *layer.output_shape(shape))
    else:
        assert agrees(layer, shape)


@given(
    shape=st.tuples(small, st.integers(1, 9)), kernel=small, stride=small, padding=st.integers(0, 2), dilation=small,
)  # fmt: skip
def test_conv1d_agrees_with_its_output_shape(
    shape: nn.Shape, kernel: int, stride: int, padding: int, dilation: int
) -> None:
    layer = nn.Conv1d(2, kernel_size=kernel, stride=stride, padding=padding, dilation=dilation)
    if not agrees(layer, shape):
        assert dilation * (kernel - 1) + 1 > shape[1] + 2 * padding


@given(size=st.tuples(small, small), factor=pairs, mode=st.sampled_from(["nearest", "bilinear"]))
def test_layers_that_resize_agree_with_their_output_shape(size: tuple[int, int], factor: Any, mode: Any) -> None:
    assert agrees(nn.Upsample(factor, mode=mode), (2, *size))
    divides = all(n % count == 0 for n, count in zip(size, np.broadcast_to(factor, 2), strict=True))
    assert agrees(nn.AdaptiveMaxPool2d(factor), (2, *size)) == divides


@given(shape=st.lists(small, min_size=1, max_size=3).map(tuple))
def test_batch_norm_agrees_with_its_output_shape(shape: nn.Shape) -> None:
    layer = nn.BatchNorm2d() if len(shape) == 3 else nn.BatchNorm1d()
    assert agrees(layer, shape)


@given(shape=st.permutations([2, 3, 4]).map(tuple), count=st.integers(0, 2))
def test_reshape_infers_one_axis(shape: nn.Shape, count: int) -> None:
    target = list(reversed(shape))
    target[count] = -1
    layer = nn.Reshape(tuple(target))
    assert layer.output_shape(shape) == tuple(reversed(shape))
    assert agrees(layer, shape)


@pytest.mark.parametrize("layer", [nn.Flatten(), nn.Reshape((-1, 2)), nn.Linear(3), nn.ReLU()], ids=lambda x: x.kind())
def test_an_empty_batch_gives_an_empty_output_of_the_right_shape(layer: nn.Module) -> None:
    shape = (3, 4)
    params, state = layer.init(shape, np.random.default_rng(0), np.dtype(np.float32))
    y, _ = layer.forward(params, state, ad.array(np.ones((0, *shape), np.float32)), nn.Mode(training=False))
    assert y.shape == (0, *layer.output_shape(shape))


@given(sizes=st.lists(small, min_size=1, max_size=4))
def test_described_parameter_counts_equal_the_allocated_ones(sizes: list[int]) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(n), nn.LayerNorm()) for n in sizes])
    params, _ = model.init((3,), np.random.default_rng(0), np.dtype(np.float32))
    rows = nn.describe(model, (3,))
    assert sum(row.parameters for row in rows) == nn.count_parameters(params)
    assert sum(map(prod, model.parameter_shapes((3,)).values())) == nn.count_parameters(params)
