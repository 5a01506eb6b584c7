"""Attention in a row-product kernel: the rows of a block are whole sequences."""

from __future__ import annotations

from collections.abc import Sequence

from adtrain.backends.cuda.codegen.block_steps import Names, Step, StepRule
from adtrain.codegen.expressions import literal
from adtrain.core.program import Equation

TILE = 16
"""Rows of a head that a warp computes (`kernels/cuda/attention/row_attention.cuh`)."""
WARP = 32


def _forward(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    (x,), (out, logsumexp) = equation.inputs, equation.outputs
    return [_step("forward", equation, [names[v] for v in (x, out, logsumexp)])]


def _backward(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    x, out, logsumexp, ct = equation.inputs
    (grad,) = equation.outputs
    return [_step("backward", equation, [names[v] for v in (x, out, logsumexp, ct, grad)])]


def _step(function: str, equation: Equation, pointers: Sequence[str]) -> Step:
    x = equation.inputs[0]
    sequences, length, row = x.type.shape
    heads = equation.params["heads"]
    causal = str(equation.params["causal"]).lower()
    kind = f"RowAttention<{sequences * length}, {length}, {heads}, {row // (3 * heads)}, {causal}>"
    arguments = ", ".join([*pointers, "(T *)partial", f"(T){literal(equation.params['scale'])}"])
    tiles = sequences * length // TILE * heads
    size = tiles * 3 * TILE * TILE * x.type.dtype.itemsize
    return Step([f"{kind}::{function}<THREADS>(t, {arguments});"], tiles * WARP, size)


RULES: dict[str, StepRule] = {"self_attention": _forward, "self_attention_grad": _backward}
"""By primitive name."""
