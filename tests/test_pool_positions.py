"""Max pooling of infinities, NaN and equal elements: the gradient goes where PyTorch's goes, never to the padding."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adtrain as ad
from adtrain import ops
from adtrain.core.staging import stage

SPECIAL = (-np.inf, np.nan, 0.0, 1.0, np.inf)
ELEMENTS = st.lists(st.sampled_from(SPECIAL), min_size=2 * 9 * 10, max_size=2 * 9 * 10)
POOLINGS = [((2, 2), (2, 2), 0), ((3, 3), (2, 1), 1), ((2, 3), (1, 2), (1, 1)), ((3, 2), (3, 2), (1, 0))]


def pooled(kernel: Any, stride: Any, padding: Any) -> Any:
    """A function of images: the maxima, and the gradient of their weighted sum."""

    def f(x: Any, weights: Any) -> Any:
        y, pullback = ad.vjp(lambda x: ops.max_pool2d(x, kernel, stride, padding), x)
        return y, pullback(weights)[0]

    return f


@functools.cache
def staged(kernel: Any, stride: Any, padding: Any) -> Any:
    return stage(pooled(kernel, stride, padding))


@pytest.mark.needs_torch
@pytest.mark.parametrize(("kernel", "stride", "padding"), POOLINGS)
@given(elements=ELEMENTS)
def test_gradient_goes_to_the_element_that_pytorch_chooses(
    kernel: Any, stride: Any, padding: Any, elements: list[float]
) -> None:
    import torch

    x = np.array(elements, np.float32).reshape(1, 2, 9, 10)
    image = torch.tensor(x, requires_grad=True)
    expected = torch.nn.functional.max_pool2d(image, kernel, stride, padding)
    weights = np.arange(1, expected.numel() + 1, dtype=np.float32).reshape(expected.shape)
    expected.backward(torch.tensor(weights))
    assert image.grad is not None
    for f in (pooled(kernel, stride, padding), staged(kernel, stride, padding)):
        y, gradient = f(x, weights)
        np.testing.assert_array_equal(y.numpy(), expected.detach().numpy())
        np.testing.assert_array_equal(gradient.numpy(), image.grad.numpy())
