"""Random expression graphs: values and gradients are PyTorch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from random_graphs import OURS, Functions, evaluate, graphs, inputs_of

import adtrain as ad
from adtrain import ops

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.needs_torch
F = torch.nn.functional

THEIRS: Functions = {
    "unary": [
        torch.sin, torch.tanh, torch.sigmoid, F.softplus, torch.erf, F.gelu, F.silu, torch.relu, torch.neg,
        lambda x: torch.exp(-(x * x)), lambda x: torch.log(1.5 + torch.square(x)), lambda x: torch.sqrt(x * x + 0.5),
        lambda x: x**3, lambda x: torch.clamp(x, -0.7, 0.9), lambda x: x.permute(tuple(reversed(range(x.ndim)))),
        lambda x: torch.flip(x, tuple(range(x.ndim))), lambda x: x.reshape(-1),
    ],
    "reduce": [
        torch.sum, torch.mean, torch.amax, torch.amin, torch.logsumexp,
        lambda x, dim, keepdim: torch.var(x, dim, keepdim=keepdim, correction=0),
    ],
    "along": [torch.softmax, torch.log_softmax, torch.cumsum],
    "binary": [
        torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, lambda x, y: x / (2.0 + y * y),
        lambda x, y: torch.where(x < y, x, y * 0.5),
    ],
    "matmul": [lambda x: x @ x.transpose(-1, -2)],
}  # fmt: skip
"""PyTorch's counterpart of each function of OURS."""
assert {kind: len(each) for kind, each in THEIRS.items()} == {kind: len(each) for kind, each in OURS.items()}


@settings(max_examples=200)
@given(graphs())
def test_values_and_gradients_of_random_graphs_equal_pytorch(graph: Any) -> None:
    shapes, program = graph
    inputs = [x.numpy() for x in inputs_of(shapes)]

    def ours(*xs: Any) -> Any:
        nodes = evaluate(xs, program)
        return ops.mean(nodes[-1]) + sum((ops.mean(n) for n in nodes), start=ops.zeros((), np.float64))

    value, grads = ad.value_and_grad(ours, tuple(range(len(inputs))))(*inputs)
    leaves = [torch.tensor(x, requires_grad=True) for x in inputs]
    nodes = evaluate(leaves, program, THEIRS)
    expected = nodes[-1].mean() + sum(n.mean() for n in nodes)
    expected.backward()
    np.testing.assert_allclose(value.numpy(), expected.detach().numpy(), rtol=1e-10, atol=1e-12)
    for grad, leaf in zip(grads, leaves, strict=True):
        scale = max(1.0, float(leaf.grad.abs().max()))
        np.testing.assert_allclose(grad.numpy(), leaf.grad.numpy(), rtol=1e-9, atol=1e-11 * scale)
