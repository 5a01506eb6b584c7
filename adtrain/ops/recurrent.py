"""Recurrent operations: rnn, lstm, gru over whole sequences, each a primitive with a gradient primitive.

The products of the inputs with weight_ih for all steps are one matrix product before the primitive. The gradient
primitive returns the cotangents of the sums at every step, the hidden states before it, and sums over the steps. The
cotangent of weight_hh is a matrix product of the first two; those of the biases are sums of the last over the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from adtrain.core.array import Value
from adtrain.core.autodiff import vjp
from adtrain.core.errors import DTypeError, ShapeError
from adtrain.core.options import checked_options
from adtrain.core.precision import FULL, matmul_precision, precision_of
from adtrain.core.primitive import Primitive, Trait
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType, Shape
from adtrain.ops.broadcasting import reshape
from adtrain.ops.common import ArrayLike, as_value, require_float
from adtrain.ops.create import zeros, zeros_like
from adtrain.ops.matmul import matmul
from adtrain.ops.recurrent_cells import CELLS, Cell, run, run_grad
from adtrain.ops.reduce import sum

FLOPS_A_GATE = 10
"""Approximate elementwise FLOPs of a step for each gate of a hidden unit; a tanh counts as one."""


@dataclass(frozen=True)
class _Rules:
    """The functions of a cell's primitives; see `_primitives`."""

    cell: Cell

    def shape(self, x: Any, weight: Any, *others: Any, reverse: bool, precision: str = FULL) -> tuple[ArrayType, ...]:
        require_float(self.cell.name, x, weight, *others)
        if dtypes := {str(each.dtype) for each in (weight, *others)} - {str(x.dtype)}:
            raise DTypeError(f"{self.cell.name}: found {x.dtype} and {min(dtypes)}, expected one type; use astype")
        n, length, _ = x.shape
        hidden = weight.shape[1]
        shapes = [
            (n, length, hidden),
            *[(n, hidden)] * self.cell.states,
            *[(n, length, hidden)] * (self.cell.states - 1),
        ]
        if self.cell.saved:
            shapes.append((n, length, self.cell.saved * hidden))
        return tuple(ArrayType(each, x.dtype) for each in shapes)

    def grad_shape(self, *args: Any, reverse: bool, precision: str = FULL) -> tuple[ArrayType, ...]:
        _, _, weight, _, outputs = _grad_arguments(self.cell, args)
        n, length, hidden = outputs[0].shape
        shapes: list[Shape] = [*[(n, length, weight.shape[0])] * self.cell.biases, (n, length, hidden)]
        shapes += [*[(n, weight.shape[0])] * self.cell.biases, *[(n, hidden)] * self.cell.states]
        return tuple(ArrayType(each, weight.dtype) for each in shapes)

    def axes(self, *args: Any, reverse: bool, precision: str = FULL) -> str:
        return _by_sequence(args, self.shape(*args, reverse=reverse), range(1, 2 + self.cell.biases))

    def grad_axes(self, *args: Any, reverse: bool, precision: str = FULL) -> str:
        return _by_sequence(args, self.grad_shape(*args, reverse=reverse), [1])

    def flops(self, first: Any, weight: Any, *others: Any, reverse: bool, precision: str = FULL) -> int:
        (sums, hidden), sequence = weight.shape, next(x for x in (first, *others) if len(x.shape) == 3)
        return int(sequence.shape[0] * sequence.shape[1] * sums * (2 * hidden + FLOPS_A_GATE))

    def reference(self, x: Any, weight: Any, *others: Any, reverse: bool, precision: str = FULL) -> Any:
        return tuple(run(self.cell, np, x, weight, others[: self.cell.biases], others[self.cell.biases :], reverse))

    def grad_reference(self, *args: Any, reverse: bool, precision: str = FULL) -> Any:
        return tuple(run_grad(self.cell, np, *_grad_arguments(self.cell, args), reverse))

    def composition(self, x: Value, weight: Value, *others: Value, reverse: bool, precision: str = FULL) -> list[Value]:
        biases, states = others[: self.cell.biases], others[self.cell.biases :]
        with matmul_precision(precision):
            return run(self.cell, Value._ops, x, weight, biases, states, reverse)

    def grad_composition(self, *args: Value, reverse: bool, precision: str = FULL) -> list[Value]:
        with matmul_precision(precision):
            return run_grad(self.cell, Value._ops, *_grad_arguments(self.cell, args), reverse)

    def rule(
        self, outputs: Sequence[Value], x: Value, weight: Value, *others: Value, reverse: bool, precision: str = FULL
    ) -> Any:
        first = others[self.cell.biases :]
        returned = 1 + self.cell.states  # only the gradient reads the outputs after these
        kept = (outputs[0], *outputs[returned:])
        params: dict[str, Any] = {"reverse": reverse, "precision": precision}

        def pullback(cts: Sequence[Value | None]) -> Sequence[Value]:
            if any(each is not None for each in cts[returned:]):  # in a derivative of the gradient
                return _pulled_back(partial(self.composition, **params), (x, weight, *others), cts)
            h, *c = (zeros_like(first[0]) if ct is None else ct for ct in cts[1:returned])
            of_all = [] if cts[0] is None else [cts[0]]
            found = bind(_CELLS[self.cell.name][2], h, weight, *c, *first, *kept, *of_all, **params)
            ds, before, *rest = found[self.cell.biases - 1 :]
            totals, states = rest[: self.cell.biases], rest[self.cell.biases :]
            rows, factors = reshape(ds, (-1, weight.shape[0])), reshape(before, (-1, weight.shape[1]))
            biases = (sum(total, 0) for total in totals[::-1])
            with matmul_precision(precision):
                by_weight = matmul(rows, factors, transpose_a=True)
            return (found[0], by_weight, *biases, *states)

        return pullback

    def grad_rule(self, out: Any, *args: Value, reverse: bool, precision: str = FULL) -> Any:
        return partial(_pulled_back, partial(self.grad_composition, reverse=reverse, precision=precision), args)


def _by_sequence(args: Sequence[Any], types: Sequence[Any], weights: Sequence[int], sums: Sequence[int] = ()) -> str:
    """Sequences move together: axis 0 of all arguments but the weights, and of all results but the sums."""
    sides = (
        ",".join("." * x.ndim if i in shared else "n" + "." * (x.ndim - 1) for i, x in enumerate(xs))
        for xs, shared in ((args, weights), (types, sums))
    )
    return "->".join(sides)


def _primitives(cell: Cell) -> tuple[Primitive, Primitive]:
    """The primitive of a cell, and the primitive of its gradient.

    ``cell(x, weight_hh, *biases, *initial states)`` is `recurrent_cells.run`. ``cell_grad(ct_h, weight_hh[, ct_c],
    *initial states, *outputs[, ct])`` is `recurrent_cells.run_grad`; ct_h and ct_c are cotangents of the last states.
    """
    rules = _Rules(cell)
    forward = Primitive(
        cell.name,
        rules.shape,
        rules.reference,
        flops=rules.flops,
        joint_vjp=rules.rule,
        composition=rules.composition,
        axes=rules.axes,
        traits=(Trait.RECURRENT,),
    )
    grad = Primitive(
        f"{cell.name}_grad",
        rules.grad_shape,
        rules.grad_reference,
        flops=rules.flops,
        joint_vjp=rules.grad_rule,
        composition=rules.grad_composition,
        axes=rules.grad_axes,
        traits=(Trait.RECURRENT,),
    )
    return forward, grad


def _grad_arguments(cell: Cell, args: Sequence[Any]) -> tuple[Any, Any, Any, Any, Any]:
    """The arguments of `recurrent_cells.run_grad` from ``ct`` to ``outputs``."""
    (h, weight, *others), n = args, cell.states
    end = 3 * n - 1 + (cell.saved > 0)
    of_all = others[end] if len(others) > end else None
    return of_all, [h, *others[: n - 1]], weight, others[n - 1 : 2 * n - 1], others[2 * n - 1 : end]


def _pulled_back(f: Callable[..., list[Value]], args: Sequence[Value], cts: Sequence[Value | None]) -> Sequence[Value]:
    """The cotangents of the arguments of ``f``, a composition of public operations."""
    outputs, pullback = vjp(f, *args)
    return pullback([zeros_like(y) if ct is None else ct for y, ct in zip(outputs, cts, strict=True)])


_CELLS = {cell.name: (cell, *_primitives(cell)) for cell in CELLS}


def _run(
    op: str,
    cell_name: str,
    x: ArrayLike,
    weight_ih: ArrayLike,
    weight_hh: ArrayLike,
    biases: Sequence[ArrayLike | None],
    first: Sequence[ArrayLike | None],
    reverse: bool,
) -> Sequence[Value]:
    """The hidden states of all steps, and the last states."""
    cell, primitive, _ = _CELLS[cell_name]
    value, w_ih, w_hh = as_value(x), as_value(weight_ih), as_value(weight_hh)
    if value.ndim != 3 or value.shape[1] == 0:
        raise ShapeError(f"{op}: found shape {value.shape}, expected (batch, length, features) of length at least 1")
    if w_hh.ndim != 2 or w_hh.shape[0] != cell.gates * w_hh.shape[1] or w_hh.size == 0:
        factor = f"{cell.gates} hidden" if cell.gates > 1 else "hidden"
        raise ShapeError(f"{op}: weight_hh has shape {w_hh.shape}, expected ({factor}, hidden)")
    sums, hidden = w_hh.shape
    batch, length, features = value.shape
    _check(op, "weight_ih", w_ih, (sums, features))
    names = ("bias_ih", "bias_hh"), ("h0", "c0")
    b_ih, b_hh = (_or_zeros(op, *given, (sums,), value) for given in zip(names[0], biases, strict=True))
    if cell.biases == 1:  # s and x are added, so one bias is enough
        both = [b_ih if biases[1] is None else b_hh if biases[0] is None else b_ih + b_hh]
    else:
        both = [b_hh, b_ih]
    states = [_or_zeros(op, *given, (batch, hidden), value) for given in zip(names[1], first, strict=False)]
    products = matmul(reshape(value, (-1, features)), w_ih, transpose_b=True)
    products = reshape(products, (batch, length, sums))
    found: Sequence[Value] = bind(
        primitive, products, w_hh, *both, *states, reverse=reverse, precision=precision_of(value.dtype)
    )
    return found[: 1 + cell.states]


def _check(op: str, what: str, value: Value, shape: Shape) -> None:
    if value.shape != shape:
        raise ShapeError(f"{op}: {what} has shape {value.shape}, expected {shape}")


def _or_zeros(op: str, what: str, given: ArrayLike | None, shape: Shape, like: Value) -> Value:
    if given is None:
        return zeros(shape, like.dtype, like.device)
    value = as_value(given)
    _check(op, what, value, shape)
    return value


@checked_options
def rnn(
    x: ArrayLike,
    weight_ih: ArrayLike,
    weight_hh: ArrayLike,
    bias_ih: ArrayLike | None = None,
    bias_hh: ArrayLike | None = None,
    h0: ArrayLike | None = None,
    *,
    nonlinearity: Literal["tanh", "relu"] = "tanh",
    reverse: bool = False,
) -> tuple[Value, Value]:
    """Elman's recurrent network, one layer in one direction: h_t = f(W_ih x_t + b_ih + W_hh h_(t-1) + b_hh).

    Args:
        x: (N, L, F): batch, steps, features.
        weight_ih, weight_hh: (H, F) and (H, H). The products with weight_hh have full precision always.
        bias_ih, bias_hh: (H,), by default zeros.
        h0: the hidden state before the first step, (N, H), by default zeros.
        nonlinearity: f.
        reverse: go from the last step to the first one.

    Returns:
        The hidden states of all steps (N, L, H), and the last one computed (N, H).

    Raises:
        ShapeError: a shape does not fit, or L is 0. OptionError: an option has another value.
    """
    output, h = _run("rnn", f"rnn_{nonlinearity}", x, weight_ih, weight_hh, (bias_ih, bias_hh), (h0,), reverse)
    return output, h


@checked_options
def lstm(
    x: ArrayLike,
    weight_ih: ArrayLike,
    weight_hh: ArrayLike,
    bias_ih: ArrayLike | None = None,
    bias_hh: ArrayLike | None = None,
    h0: ArrayLike | None = None,
    c0: ArrayLike | None = None,
    *,
    reverse: bool = False,
) -> tuple[Value, Value, Value]:
    """Long short-term memory, one layer in one direction (F. A. Gers et al., Learning to Forget, 2000).

    Arguments and errors as of `rnn`. Weights and biases have 4 H rows: the input gate, forget gate, cell and output
    gate, in PyTorch's order. ``c0`` is the cell state before the first step, (N, H), by default zeros.

    Returns:
        The hidden states of all steps (N, L, H), and the last hidden and cell states computed, (N, H) each.
    """
    output, h, c = _run("lstm", "lstm", x, weight_ih, weight_hh, (bias_ih, bias_hh), (h0, c0), reverse)
    return output, h, c


@checked_options
def gru(
    x: ArrayLike,
    weight_ih: ArrayLike,
    weight_hh: ArrayLike,
    bias_ih: ArrayLike | None = None,
    bias_hh: ArrayLike | None = None,
    h0: ArrayLike | None = None,
    *,
    reverse: bool = False,
) -> tuple[Value, Value]:
    """Gated recurrent unit, one layer in one direction (K. Cho et al., 2014); the new state is tanh(x_n + r s_n).

    Arguments, results and errors as of `rnn`. Weights and biases have 3 H rows: reset gate, update gate and new state,
    in PyTorch's order.
    """
    output, h = _run("gru", "gru", x, weight_ih, weight_hh, (bias_ih, bias_hh), (h0,), reverse)
    return output, h
