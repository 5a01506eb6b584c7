"""Convolution over one, two and three axes, compared with PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import adtrain as ad
from adtrain import ops
from adtrain.core.errors import OptionError, ShapeError


@pytest.mark.needs_torch
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # PyTorch warns about its speed
@settings(max_examples=40)
@given(data=st.data(), axes=st.sampled_from((1, 2, 3)), transposed=st.booleans(), groups=st.sampled_from((1, 2)))
def test_convolution_is_that_of_pytorch(data: Any, axes: int, transposed: bool, groups: int) -> None:
    import torch

    def numbers(low: int, high: int) -> list[int]:
        return data.draw(st.lists(st.integers(low, high), min_size=axes, max_size=axes))

    kernel, sizes, stride = numbers(1, 3), numbers(5, 6), numbers(1, 2)
    options: dict[str, Any] = {"stride": stride, "padding": numbers(0, 1), "dilation": numbers(1, 2), "groups": groups}
    if transposed:
        options["output_padding"] = [
            data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, options["dilation"], strict=True)
        ]
    elif data.draw(st.booleans()):
        options |= {"stride": [1] * axes, "padding": "same"}
    name = f"conv_transpose{axes}d" if transposed else f"conv{axes}d"
    rng = np.random.default_rng(0)
    weight = (4, 3, *kernel) if transposed else (6, 4 // groups, *kernel)
    shapes = ((2, 4, *sizes), weight, (3 * groups if transposed else 6,))
    inputs = [rng.normal(size=shape) for shape in shapes]
    tensors = [torch.tensor(x, requires_grad=True) for x in inputs]
    expected = getattr(torch.nn.functional, name)(*tensors, **options)
    weights = rng.normal(size=expected.shape)
    expected.backward(torch.tensor(weights))
    out, pullback = ad.vjp(lambda *xs: getattr(ops, name)(*xs, **options), *inputs)
    np.testing.assert_allclose(out.numpy(), expected.detach().numpy(), rtol=1e-9, atol=1e-9)
    for found, tensor in zip(pullback(weights), tensors, strict=True):
        np.testing.assert_allclose(found.numpy(), tensor.grad.numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": "same", "stride": 2}, 'padding "same" needs stride 1'),
        ({"padding": 2**31}, r"padding is 2147483648, expected an integer in \[0, 2\^31\)"),
        ({"padding": 2**30}, "has 2\\^31 elements or more"),
        ({"dilation": 2**31 - 1}, "is larger than the input"),
    ],
)
def test_invalid_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((OptionError, ShapeError), match=message):
        ops.conv2d(np.ones((1, 1, 4, 4), np.float32), np.ones((1, 1, 3, 3), np.float32), **options)
