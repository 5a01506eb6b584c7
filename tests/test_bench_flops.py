"""FLOPs that `adtrain bench` counts, against counts by hand and by PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
import pytest

from adtrain import nn, ops
from adtrain.bench import ops as bench_ops
from adtrain.bench.op_table import BENCHES, TimedOp
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.samplers import normal

CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 3, 8, 8), (4, 3, 3, 3), {}),
    "stride": ((2, 3, 9, 8), (4, 3, 3, 2), {"stride": (2, 3), "padding": 1}),
    "groups": ((2, 4, 7, 7), (6, 2, 3, 3), {"groups": 2, "stride": 2}),
    "dilation": ((1, 2, 9, 9), (3, 2, 3, 3), {"dilation": 2}),
}
PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "matmul": (lambda a, b: a @ b, (5, 6), (6, 7)),
    "b transposed": (lambda a, b: ops.matmul(a, b, transpose_b=True), (5, 6), (7, 6)),
    "batch": (lambda a, b: a @ b, (3, 5, 6), (3, 6, 7)),
}


def flops(f: Callable[..., Any], *samplers: Any) -> dict[str, int]:
    """FLOPs of an operation by phase."""
    each = TimedOp("", "", {}, lambda n: samplers, f)
    found = bench_ops.phases(each, bench_ops.sample(each, 1))
    return {phase: bench_ops.cost(bench_ops.program(g, args)).flops for phase, (g, args) in found.items()}


def output_shape(x: tuple[int, ...], w: tuple[int, ...], options: Any) -> tuple[int, ...]:
    out: tuple[int, ...] = ops.conv2d(np.zeros(x, np.float32), np.zeros(w, np.float32), **options).shape
    return out


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_flops_of_convolution_and_gradients(name: str) -> None:
    x, w, options = CONVOLUTIONS[name]
    count = 2 * prod(output_shape(x, w, options)) * prod(w[1:])
    found = flops(lambda x, w: ops.conv2d(x, w, **options), normal(*x), normal(*w))
    assert found == {"forward": count, "backward x": count, "backward w": count}


@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_of_matrix_product_and_gradients(name: str) -> None:
    f, a, b = PRODUCTS[name]
    count = 2 * prod(a) * 7
    assert flops(f, normal(*a), normal(*b)) == {"forward": count, "backward a": count, "backward b": count}


def test_flops_of_linear_layer_with_bias() -> None:
    layer = nn.Linear(7)
    params, state = layer.init((6,), np.random.default_rng(0), np.dtype(np.float32))

    def loss(params: Any, x: Any) -> Any:
        return layer.forward(params, state, x, nn.Mode(training=True))[0]

    x = array(np.ones((5, 6), np.float32))
    assert len(tree.leaves(params)) == 2
    assert bench_ops.cost(bench_ops.program(loss, [params, x])).flops == 2 * 5 * 6 * 7 + 5 * 7


@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (3, 2)])
@pytest.mark.parametrize("op", [ops.max_pool2d, ops.avg_pool2d])
def test_pooling_counts_each_element_of_each_window(op: Callable[..., Any], kernel: int, stride: int) -> None:
    outputs = 2 * 3 * ((8 - kernel) // stride + 1) ** 2
    found = flops(lambda x: op(x, kernel, stride), normal(2, 3, 8, 8))
    assert found["forward"] == outputs * kernel**2
    # The gradient of a maximum goes to one position per window, that of an average to all.
    assert found["backward x"] == outputs * (1 if op is ops.max_pool2d else kernel**2)


def test_flops_of_normalization() -> None:
    """Mean: a sum. Variance: a difference, a square and a sum. Result: a difference and a product.
    Work that is done once per row is not counted."""
    plain = flops(lambda x: ops.layer_norm(x, 8), normal(5, 8))
    affine = flops(lambda x, w, b: ops.layer_norm(x, 8, w, b), normal(5, 8), normal(8), normal(8))
    assert plain["forward"] == 6 * 40
    assert affine["forward"] == 8 * 40
    assert (affine["backward w"], affine["backward b"]) == (2 * 40, 40)  # products and their sum, and a sum


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.needs_torch
def test_flops_of_convolutions_equal_pytorchs_count(name: str) -> None:
    x, w, options = CONVOLUTIONS[name]
    found = flops(lambda x, w: ops.conv2d(x, w, **options), normal(*x), normal(*w))
    forward, backward = pytorch_counts("conv2d", x, w, options)
    assert found["forward"] == forward
    # For the gradient of a weight, PyTorch counts products as if there were one group.
    assert found["backward x"] + found["backward w"] * options.get("groups", 1) == backward


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.needs_torch
def test_flops_of_products_equal_pytorchs_count(name: str) -> None:
    f, a, b = PRODUCTS[name]
    found = flops(f, normal(*a), normal(*b))
    forward, backward = pytorch_counts("matmul" if name != "b transposed" else "linear", a, b, {})
    assert (found["forward"], found["backward a"] + found["backward b"]) == (forward, backward)


def pytorch_counts(op: str, a: tuple[int, ...], b: tuple[int, ...], options: Mapping[str, Any]) -> tuple[int, int]:
    """Counts of `FlopCounterMode` for the forward pass, and for the gradients of both arguments."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    function = torch.matmul if op == "matmul" else getattr(torch.nn.functional, op)
    given = [torch.ones(shape, requires_grad=True) for shape in (a, b)]
    with FlopCounterMode(display=False) as forward:
        out = function(*given, **options)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def test_broadcast_gradient_counts_all_written_bytes() -> None:
    (each,) = (bench for bench in BENCHES if (bench.op, bench.variant) == ("mean", "axis None"))
    phases = bench_ops.phases(each, bench_ops.sample(each, 16))
    division = 1 + 1 + 1
    assert bench_ops.cost(bench_ops.program(*phases["forward"])).bytes == 4 * (16 * 16 + 1 + division)
    assert bench_ops.cost(bench_ops.program(*phases["backward x"])).bytes == 4 * (division + 16 * 16)
