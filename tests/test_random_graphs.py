"""Random expression graphs, with shared nodes, broadcasting and reductions: values and gradients are PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import adtrain as ad
from adtrain import ops

torch = pytest.importorskip("torch")
F = torch.nn.functional

SHAPES = [(), (3,), (2, 3), (2, 1), (1, 3), (4, 2, 3)]

UNARY: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
    (ops.sin, torch.sin), (ops.tanh, torch.tanh), (ops.sigmoid, torch.sigmoid), (ops.softplus, F.softplus),
    (ops.erf, torch.erf), (ops.gelu, F.gelu), (ops.silu, F.silu), (ops.relu, torch.relu), (ops.neg, torch.neg),
    (lambda x: ops.exp(-(x * x)), lambda x: torch.exp(-(x * x))),
    (lambda x: ops.log(1.5 + ops.square(x)), lambda x: torch.log(1.5 + torch.square(x))),
    (lambda x: ops.sqrt(x * x + 0.5), lambda x: torch.sqrt(x * x + 0.5)),
    (lambda x: ops.power(x, 3), lambda x: x**3),
    (lambda x: ops.clip(x, -0.7, 0.9), lambda x: torch.clamp(x, -0.7, 0.9)),
    (lambda x: ops.transpose(x), lambda x: x.permute(tuple(reversed(range(x.ndim))))),
    (lambda x: ops.flip(x), lambda x: torch.flip(x, tuple(range(x.ndim)))),
    (lambda x: ops.reshape(x, (-1,)), lambda x: x.reshape(-1)),
]  # fmt: skip
REDUCE: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (ops.sum, torch.sum), (ops.mean, torch.mean), (ops.max, torch.amax), (ops.min, torch.amin),
    (ops.logsumexp, torch.logsumexp),
    (lambda x, axis, keepdims: ops.var(x, axis, keepdims),
     lambda x, dim, keepdim: torch.var(x, dim, keepdim=keepdim, correction=0)),
]  # fmt: skip
ALONG: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (ops.softmax, torch.softmax), (ops.log_softmax, torch.log_softmax), (ops.cumsum, torch.cumsum),
]  # fmt: skip
BINARY: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (ops.add, torch.add), (ops.sub, torch.sub), (ops.mul, torch.mul), (ops.maximum, torch.maximum),
    (ops.minimum, torch.minimum), (lambda x, y: ops.div(x, 2.0 + y * y), lambda x, y: x / (2.0 + y * y)),
    (lambda x, y: ops.where(ops.less(x, y), x, y * 0.5), lambda x, y: torch.where(x < y, x, y * 0.5)),
]  # fmt: skip


@st.composite
def graphs(draw: Any) -> tuple[list[tuple[int, ...]], list[tuple[Any, ...]]]:
    """Shapes of the inputs, and instructions each of which adds a node made of earlier ones."""
    shapes = list(draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3)))
    inputs = list(shapes)
    program: list[tuple[Any, ...]] = []
    for _ in range(draw(st.integers(1, 9))):
        a, b = (draw(st.integers(0, len(shapes) - 1)) for _ in range(2))
        kind = draw(st.sampled_from(["unary", "reduce", "along", "binary", "binary", "matmul"]))
        if kind == "unary":
            which = draw(st.integers(0, len(UNARY) - 1))
            program.append(("unary", UNARY[which], a))
        elif kind in ("reduce", "along") and shapes[a]:
            axis = draw(st.integers(0, len(shapes[a]) - 1))
            table = REDUCE if kind == "reduce" else ALONG
            program.append((kind, table[draw(st.integers(0, len(table) - 1))], a, axis, draw(st.booleans())))
        elif kind == "matmul" and len(shapes[a]) >= 2:
            program.append(("matmul", None, a))
        else:
            try:
                np.broadcast_shapes(shapes[a], shapes[b])
            except ValueError:
                continue
            program.append(("binary", BINARY[draw(st.integers(0, len(BINARY) - 1))], a, b))
        shapes.append(evaluate(inputs_of(inputs), program, 0)[-1].shape)
    return inputs, program


def inputs_of(shapes: list[tuple[int, ...]]) -> list[Any]:
    rng = np.random.default_rng(len(shapes))
    return [ad.array(rng.normal(size=shape)) for shape in shapes]


def evaluate(values: Any, program: list[tuple[Any, ...]], side: int) -> list[Any]:
    """Run the instructions with our operations (side 0) or PyTorch's (side 1)."""
    nodes = list(values)
    for kind, pair, *operands in program:
        x = nodes[operands[0]]
        if kind == "unary":
            nodes.append(pair[side](x))
        elif kind == "reduce":
            nodes.append(pair[side](x, operands[1], operands[2]))
        elif kind == "along":
            nodes.append(pair[side](x, operands[1]))
        elif kind == "binary":
            nodes.append(pair[side](x, nodes[operands[1]]))
        else:
            nodes.append(ops.matmul(x, x, transpose_b=True) if side == 0 else x @ x.transpose(-1, -2))
    return nodes


@settings(max_examples=300)
@given(graphs())
def test_values_and_gradients_of_random_graphs_are_those_of_pytorch(graph: Any) -> None:
    shapes, program = graph
    inputs = [x.numpy() for x in inputs_of(shapes)]

    def ours(*xs: Any) -> Any:
        nodes = evaluate(xs, program, 0)
        return ops.mean(nodes[-1]) + sum((ops.mean(n) for n in nodes), start=ops.zeros((), np.float64))

    value, grads = ad.value_and_grad(ours, tuple(range(len(inputs))))(*inputs)
    leaves = [torch.tensor(x, requires_grad=True) for x in inputs]
    nodes = evaluate(leaves, program, 1)
    expected = nodes[-1].mean() + sum(n.mean() for n in nodes)
    expected.backward()
    np.testing.assert_allclose(value.numpy(), expected.detach().numpy(), rtol=1e-10, atol=1e-12)
    for grad, leaf in zip(grads, leaves, strict=True):
        scale = max(1.0, float(leaf.grad.abs().max()))
        np.testing.assert_allclose(grad.numpy(), leaf.grad.numpy(), rtol=1e-9, atol=1e-11 * scale)
