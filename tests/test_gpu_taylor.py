"""Taylor mode on a GPU matches the CPU: Laplacians, and the gradient of a loss with derivatives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_parity import TOLERANCE, check, gpu, poisoned

import adtrain as ad
from adtrain import ops

__all__ = ["gpu", "poisoned"]

pytestmark = pytest.mark.gpu


def network(parameters: Any, x: Any) -> Any:
    w, b, out = parameters
    return ops.matmul(ops.tanh(ops.matmul(ops.tanh(ops.matmul(x, w) + b), w) + b), out)


def arguments(width: int, dtype: str) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    shapes = (width, width), (width,), (width, 1)
    parameters = [rng.normal(size=shape) / shape[0] ** 0.5 for shape in shapes]
    return [ad.array(p.astype(dtype)) for p in parameters], ad.array(rng.normal(size=(70, width)).astype(dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_laplacians_match_the_cpu(dtype: str) -> None:
    f = ad.jit(ad.vmap(lambda p, x: ad.laplacian(lambda x: network(p, x)[0], x), (None, 0)))
    given = arguments(16, dtype)
    expected, found = (f(*args) for args in (given, ad.tree.map(lambda x: x.to("gpu"), given)))
    check([x.numpy() for x in found], [x.numpy() for x in expected], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradients_of_a_loss_with_derivatives_match_the_cpu(dtype: str) -> None:
    def loss(p: Any, x: Any) -> Any:
        value, (first, second) = ad.jet(lambda x: network(p, x), (x,), [(ops.ones_like(x),), None])
        return ops.mean((value * first - 0.1 * second) ** 2)

    f = ad.jit(ad.value_and_grad(loss))
    given = arguments(16, dtype)
    expected, found = (f(*args) for args in (given, ad.tree.map(lambda x: x.to("gpu"), given)))
    check([x.numpy() for x in ad.tree.leaves(found)], [x.numpy() for x in ad.tree.leaves(expected)], TOLERANCE[dtype])
