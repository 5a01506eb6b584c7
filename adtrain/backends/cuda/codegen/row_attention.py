"""How a block of a row-product kernel computes attention of the sequences that its rows are."""

from __future__ import annotations

from collections.abc import Sequence

from adtrain.backends.cuda.codegen.one_block_forms import Form, Names, Step
from adtrain.codegen.expressions import c_type, literal
from adtrain.core.program import Equation

LANES = 8
"""Threads that share a row of a head (`kernels/cuda/attention/row_attention.cuh`)."""


def _forward(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    (x,), (out, logsumexp) = equation.inputs, equation.outputs
    pointers = ", ".join(names[v] for v in (x, out, logsumexp))
    return [Step([f"{_kind(equation)}().forward(t, {pointers}, {_scale(equation)});"], _threads(equation, threads))]


def _backward(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    x, out, logsumexp, ct = equation.inputs
    (grad,) = equation.outputs
    c = c_type(x.type.dtype)
    pointers = ", ".join(names[v] for v in (x, out, logsumexp, ct, grad))
    queries = f"{_kind(equation)}().backward_queries(t, {pointers}, ({c} *)partial, {_scale(equation)});"
    keys = f"{_kind(equation)}().backward_keys(t, {names[x]}, {names[ct]}, {names[grad]}, (const {c} *)partial);"
    sequences, length, _ = x.type.shape
    size = 2 * sequences * length * equation.params["heads"] * length * x.type.dtype.itemsize
    busy = _threads(equation, threads)
    return [Step([queries], busy, size), Step([keys], busy)]


def _kind(equation: Equation) -> str:
    x = equation.inputs[0]
    sequences, length, row = x.type.shape
    heads = equation.params["heads"]
    causal = str(equation.params["causal"]).lower()
    lengths = f"{sequences * length}, {length}, {heads}, {row // (3 * heads)}"
    return f"RowAttention<{c_type(x.type.dtype)}, THREADS, {lengths}, {causal}>"


def _scale(equation: Equation) -> str:
    return f"({c_type(equation.inputs[0].type.dtype)}){literal(equation.params['scale'])}"


def _threads(equation: Equation, threads: int) -> int:
    sequences, length, _ = equation.inputs[0].type.shape
    return min(sequences * length * equation.params["heads"] * LANES, threads)


FORMS: dict[str, Form] = {"self_attention": _forward, "self_attention_grad": _backward}
"""By primitive name."""
