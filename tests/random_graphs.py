"""Random expression graphs, with shared nodes, broadcasting and reductions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from hypothesis import strategies as st

import adtrain as ad
from adtrain import ops

SHAPES = [(), (3,), (2, 3), (2, 1), (1, 3), (4, 2, 3)]

Functions: TypeAlias = "Mapping[str, Sequence[Callable[..., Any]]]"
"""For each kind of instruction the functions that it may apply."""

OURS: Functions = {
    "unary": [
        ops.sin, ops.tanh, ops.sigmoid, ops.softplus, ops.erf, ops.gelu, ops.silu, ops.relu, ops.neg,
        lambda x: ops.exp(-(x * x)), lambda x: ops.log(1.5 + ops.square(x)), lambda x: ops.sqrt(x * x + 0.5),
        lambda x: ops.power(x, 3), lambda x: ops.clip(x, -0.7, 0.9), lambda x: ops.transpose(x),
        lambda x: ops.flip(x), lambda x: ops.reshape(x, (-1,)),
    ],
    "reduce": [
        ops.sum, ops.mean, ops.max, ops.min, ops.logsumexp, lambda x, axis, keepdims: ops.var(x, axis, keepdims),
    ],
    "along": [ops.softmax, ops.log_softmax, ops.cumsum],
    "binary": [
        ops.add, ops.sub, ops.mul, ops.maximum, ops.minimum, lambda x, y: ops.div(x, 2.0 + y * y),
        lambda x, y: ops.where(ops.less(x, y), x, y * 0.5),
    ],
    "matmul": [lambda x: ops.matmul(x, x, transpose_b=True)],
}  # fmt: skip


@st.composite
def graphs(draw: Any) -> tuple[list[tuple[int, ...]], list[tuple[Any, ...]]]:
    """Shapes of the inputs, and instructions. Each instruction computes a node from earlier ones."""
    shapes = list(draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3)))
    inputs = list(shapes)
    program: list[tuple[Any, ...]] = []
    for _ in range(draw(st.integers(1, 9))):
        a, b = (draw(st.integers(0, len(shapes) - 1)) for _ in range(2))
        kind = draw(st.sampled_from(["unary", "reduce", "along", "binary", "binary", "matmul"]))
        if kind == "unary":
            which = draw(st.integers(0, len(OURS["unary"]) - 1))
            program.append(("unary", which, a))
        elif kind in ("reduce", "along") and shapes[a]:
            axis = draw(st.integers(0, len(shapes[a]) - 1))
            program.append((kind, draw(st.integers(0, len(OURS[kind]) - 1)), a, axis, draw(st.booleans())))
        elif kind == "matmul" and len(shapes[a]) >= 2:
            program.append(("matmul", 0, a))
        else:
            try:
                np.broadcast_shapes(shapes[a], shapes[b])
            except ValueError:
                continue
            program.append(("binary", draw(st.integers(0, len(OURS["binary"]) - 1)), a, b))
        shapes.append(evaluate(inputs_of(inputs), program)[-1].shape)
    return inputs, program


def inputs_of(shapes: list[tuple[int, ...]]) -> list[Any]:
    rng = np.random.default_rng(len(shapes))
    return [ad.array(rng.normal(size=shape)) for shape in shapes]


def evaluate(values: Any, program: list[tuple[Any, ...]], functions: Functions = OURS) -> list[Any]:
    """The values of all nodes, computed with these functions."""
    nodes = list(values)
    for kind, which, *operands in program:
        f, x = functions[kind][which], nodes[operands[0]]
        if kind == "reduce":
            nodes.append(f(x, operands[1], operands[2]))
        elif kind == "along":
            nodes.append(f(x, operands[1]))
        elif kind == "binary":
            nodes.append(f(x, nodes[operands[1]]))
        else:
            nodes.append(f(x))
    return nodes
