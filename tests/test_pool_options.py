"""Options of pooling over one, two and three axes, compared with PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import adtrain as ad
from adtrain import ops
from adtrain.core.errors import OptionError, ShapeError
from adtrain.core.staging import stage

SPECIAL = np.array([-np.inf, np.nan, 0, 1, 2.5, 3, 4, np.inf], np.float32)


@pytest.mark.needs_torch
@settings(max_examples=60)
@given(data=st.data(), axes=st.sampled_from((1, 2, 3)), largest=st.booleans(), seed=st.integers(0, 999))
def test_pooling_is_that_of_pytorch(data: Any, axes: int, largest: bool, seed: int) -> None:
    import torch

    def numbers(low: int, high: int) -> list[int]:
        return data.draw(st.lists(st.integers(low, high), min_size=axes, max_size=axes))

    kernel, stride, sizes = numbers(1, 3), numbers(1, 3), numbers(5, 7)
    padding = [data.draw(st.integers(0, k // 2)) for k in kernel]
    options: dict[str, Any] = {"ceil_mode": data.draw(st.booleans())}
    if largest:
        options["dilation"] = numbers(1, 2)
    else:
        options["count_include_pad"] = data.draw(st.booleans())
        if axes > 1:
            options["divisor_override"] = data.draw(st.sampled_from((None, 3, -2)))
    name = f"{'max' if largest else 'avg'}_pool{axes}d"
    rng = np.random.default_rng(seed)
    x = rng.choice(SPECIAL, (2, 2, *sizes)) if largest else rng.normal(size=(2, 2, *sizes)).astype(np.float32)
    image = torch.tensor(x, requires_grad=True)
    arguments = (kernel, stride, padding)
    expected = getattr(torch.nn.functional, name)(image, *arguments, **options)
    weights = rng.normal(size=expected.shape).astype(np.float32)
    expected.backward(torch.tensor(weights))
    assert image.grad is not None
    out, pullback = ad.vjp(lambda x: getattr(ops, name)(x, *arguments, **options), x)
    np.testing.assert_allclose(out.numpy(), expected.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(pullback(weights)[0].numpy(), image.grad.numpy(), rtol=1e-5, atol=1e-6)
    if largest:
        positions = getattr(torch.nn.functional, name)(image, *arguments, **options, return_indices=True)[1]
        found = getattr(ops, name)(x, *arguments, **options, return_indices=True)[1].numpy()
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, positions.numpy())


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
def test_max_pooling_of_integers_keeps_their_type(dtype: str) -> None:
    x = np.array([[[[1, 7, 2], [5, 0, 200], [3, 3, 9]]]], dtype)
    out, positions = ops.max_pool2d(x, 2, 1, return_indices=True)
    assert out.dtype == dtype
    assert out.numpy().tolist() == [[[[7, 200], [5, 200]]]]
    assert positions.numpy().tolist() == [[[[1, 5], [3, 5]]]]


def test_compiled_pooling_equals_eager_pooling() -> None:
    def f(x: Any) -> Any:
        return ops.max_pool2d(x, 2, 2, dilation=2, ceil_mode=True, return_indices=True)

    x = np.random.default_rng(0).normal(size=(2, 3, 6, 7)).astype(np.float32)
    for found, expected in zip(stage(f)(x), f(x), strict=True):
        np.testing.assert_array_equal(found.numpy(), expected.numpy())


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (
            lambda x: ops.max_pool2d(x, 2**31),
            r"max_pool2d: kernel_size is 2147483648, expected an integer in \[1, 2\^31\)",
        ),
        (lambda x: ops.avg_pool2d(x, 2**31 - 1, padding=2**30 - 1), "has 2\\^31 elements or more"),
        (lambda x: ops.max_pool2d(x, 2, padding="sane"), "padding is 'sane', expected integers"),
        (lambda x: ops.max_pool2d(x, 2, padding=((1, 0), 1)), "expected 2 pairs"),
        (lambda x: ops.avg_pool2d(x, 2, divisor_override=0), "divisor_override is 0"),
        (lambda x: ops.adaptive_avg_pool2d(x, 2**31 - 1), "needs 2\\^31 elements or more"),
    ],
)
def test_invalid_options_are_named(f: Any, message: str) -> None:
    with pytest.raises((OptionError, ShapeError), match=message):
        f(np.ones((1, 1, 4, 4), np.float32))
