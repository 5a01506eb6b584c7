"""The naive loops, which are timed for comparison, compute the same as the operations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adtrain import ops
from adtrain.backends.cpu import naive
from adtrain.bench.op_table import BY_NAIVE_LOOPS, TimedOp
from adtrain.core.array import array
from adtrain.core.autodiff import vjp

pytestmark = pytest.mark.compiled
SIZES = st.integers(1, 5)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@pytest.mark.parametrize("op", BY_NAIVE_LOOPS, ids=lambda op: op.op)
def test_naive_loop_equals_the_operation(op: TimedOp) -> None:
    assert op.naive
    for n in op.naive.sizes[:2]:
        inputs = [x.astype(np.float32) for x in op.arrays(n)]
        np.testing.assert_allclose(op.naive.loop(*inputs), op.f(*map(array, inputs)).numpy(), rtol=1e-4, atol=1e-4)


@given(SIZES, SIZES, SIZES, st.booleans(), st.booleans())
def test_naive_products_of_transposed_matrices(m: int, k: int, n: int, ta: bool, tb: bool) -> None:
    a, b = random(m, k), random(k, n)
    found = naive.matmul(a.T if ta else a, b.T if tb else b, ta, tb)
    np.testing.assert_allclose(found, a @ b, rtol=1e-5, atol=1e-6)


@given(SIZES, SIZES, SIZES, st.integers(1, 3), st.integers(1, 3), st.integers(0, 2))
def test_naive_convolutions_and_gradients(n: int, c: int, o: int, kernel: int, stride: int, padding: int) -> None:
    image, weight = random(n, c, 5, 6), random(o, c, kernel, 2)
    out, pullback = vjp(lambda x, w: ops.conv2d(x, w, stride=stride, padding=padding), array(image), array(weight))
    sizes = naive.conv_sizes(image.shape, weight.shape, (stride, stride), (padding, padding))
    ct = random(*out.shape)
    by_image, by_weight = (x.numpy() for x in pullback(array(ct)))
    found = [
        (naive.call("conv2d", out.shape, image, weight, *sizes), out.numpy()),
        (naive.call("conv2d_input_grad", image.shape, ct, weight, *sizes), by_image),
        (naive.call("conv2d_weight_grad", weight.shape, image, ct, *sizes), by_weight),
    ]
    for ours, expected in found:
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)
