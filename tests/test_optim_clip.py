"""Clipping equals PyTorch's and leaves small gradients unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adtrain as ad
from adtrain import optim
from adtrain.core import tree
from adtrain.core.errors import OptionError


def gradients(scale: float, dtype: type = np.float64) -> Any:
    rng = np.random.default_rng(0)
    return {"a": ad.array((scale * rng.normal(size=(3, 4))).astype(dtype)), "b": [ad.array(dtype(scale))]}


@given(scale=st.floats(1e-3, 1e3), max_norm=st.floats(1e-2, 1e2))
@pytest.mark.needs_torch
def test_clip_by_norm_equals_pytorch(scale: float, max_norm: float) -> None:
    import torch

    grads = gradients(scale)
    theirs = [torch.nn.Parameter(torch.zeros(x.shape, dtype=torch.float64)) for x in tree.leaves(grads)]
    for parameter, grad in zip(theirs, tree.leaves(grads), strict=True):
        parameter.grad = torch.tensor(grad.numpy())
    their_norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    clipped, norm = optim.clip_by_norm(grads, max_norm)
    assert norm.item() == pytest.approx(their_norm.item(), rel=1e-12)
    for mine, parameter in zip(tree.leaves(clipped), theirs, strict=True):
        np.testing.assert_allclose(mine, parameter.grad.numpy(), rtol=1e-12)


def test_clip_by_norm_leaves_small_and_zero_gradients_unchanged() -> None:
    for scale in (0.0, 1e-3):
        grads = gradients(scale)
        clipped, _ = optim.clip_by_norm(grads, 1.0)
        for a, b in zip(tree.leaves(clipped), tree.leaves(grads), strict=True):
            np.testing.assert_array_equal(a, b)


def test_clip_by_norm_keeps_float32() -> None:
    clipped, norm = optim.clip_by_norm(gradients(10.0, np.float32), 1.0)
    assert {x.dtype for x in (*tree.leaves(clipped), norm)} == {np.dtype(np.float32)}
    assert np.sqrt(sum(np.square(x.numpy()).sum() for x in tree.leaves(clipped))) == pytest.approx(1.0, rel=1e-5)


@given(scale=st.floats(1e-3, 1e3), limit=st.floats(1e-2, 1e2))
def test_clip_by_value_equals_numpys_clip(scale: float, limit: float) -> None:
    grads = gradients(scale)
    for a, b in zip(tree.leaves(optim.clip_by_value(grads, limit)), tree.leaves(grads), strict=True):
        np.testing.assert_array_equal(a, np.clip(b.numpy(), -limit, limit))


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan")])
def test_a_bound_that_is_not_above_0_is_an_error(bound: float) -> None:
    with pytest.raises(OptionError, match=rf"^clip_by_norm: max_norm is {bound}, expected a number in \(0, 3\.4e38\]$"):
        optim.clip_by_norm(gradients(1.0), bound)
    with pytest.raises(OptionError, match=rf"^clip_by_value: limit is {bound}, expected a number in \(0, 3\.4e38\]$"):
        optim.clip_by_value(gradients(1.0), bound)


def test_clipping_no_gradients_is_an_error() -> None:
    with pytest.raises(OptionError, match=r"^clip_by_norm: found no gradients, expected at least one$"):
        optim.clip_by_norm({}, 1.0)
