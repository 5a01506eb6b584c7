"""Random expression graphs as Programs: values, gradients, and an update of the arguments, which are donated."""

from __future__ import annotations

from typing import Any

import random_graphs as graphs

import adtrain as ad
from adtrain import ops
from adtrain.core.program import Program
from adtrain.core.staging import stage

__all__ = ["graphs", "program_of", "step_of"]


def step_of(graph: Any) -> Any:
    """A function of the graph's inputs: some of its values, and the inputs minus 0.1 times their gradients."""
    _, instructions = graph

    def f(*xs: Any) -> Any:
        nodes = graphs.evaluate(xs, instructions)
        return ops.mean(nodes[-1]) + sum((ops.mean(n) for n in nodes), start=ops.zeros((), xs[0].dtype)), nodes[-1]

    def step(*xs: Any) -> Any:
        (value, last), grads = ad.value_and_grad(f, tuple(range(len(xs))), has_aux=True)(*xs)
        with ad.core.trace.phase("update"):
            return value, last, [x - 0.1 * g for x, g in zip(xs, grads, strict=True)]

    return step


def program_of(graph: Any) -> Program:
    shapes, _ = graph
    return stage(step_of(graph), donate=range(len(shapes))).program(*graphs.inputs_of(shapes))
