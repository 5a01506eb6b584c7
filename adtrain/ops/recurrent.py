"""Recurrent operations: rnn, lstm, gru over whole sequences, each a primitive with a gradient primitive.

The products of the inputs with weight_ih for all steps are one matrix product before the primitive. The gradient
primitive returns the cotangents of the sums at every step, the hidden states before it, and sums over the steps. The
cotangent of weight_hh is a matrix product of the first two; those of the biases are sums of the last over the batch.

The formulas of a cell serve twice: on NumPy arrays as the reference of a primitive, and on Values as a composition of
public operations, whose derivatives have any order. ``xp`` is the module of functions: `numpy` or `adtrain.ops`.

A step gets x, its share of the input products, and s = W_hh h + b_hh, both (N, gates H) with the gates in PyTorch's
order, the hidden state h and for an LSTM the cell state c, both (N, H). It returns the new states, and what the
gradient needs again. The gradient of a step gets the cotangents of the new states. It returns those of x, of s, and of
the states as far as they do not go through s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any, Literal

import numpy as np

from adtrain.core.array import Value
from adtrain.core.autodiff import pulled_back
from adtrain.core.errors import DTypeError, ShapeError
from adtrain.core.options import checked_options
from adtrain.core.precision import FULL, matmul_precision, precision_of
from adtrain.core.primitive import Primitive, Trait
from adtrain.core.trace import bind
from adtrain.core.types import ArrayType, Shape
from adtrain.ops.common import ArrayLike, as_value, require_float, reshape
from adtrain.ops.create import zeros, zeros_like
from adtrain.ops.matmul import matmul
from adtrain.ops.reduce import sum

__all__ = ["gru", "lstm", "rnn"]


@dataclass(frozen=True)
class Cell:
    """A recurrent cell.

    Attributes:
        name: of its primitive, and of its C and CUDA functions.
        gates: weight_hh is (gates H, H).
        biases: 1, which s includes; 2 with one that x includes. Of other cells the two biases of a layer are one sum.
        states: 1 for a hidden state, 2 with a cell state.
        saved: of each step, in units of H: the numbers that the gradient needs besides the states.
    """

    name: str
    gates: int
    biases: int
    states: int
    saved: int

    def step(self, xp: Any, x: Any, s: Any, states: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The new states, and the saved numbers in a list of at most one array."""
        raise NotImplementedError

    def step_grad(
        self, xp: Any, cts: Sequence[Any], before: Sequence[Any], after: Sequence[Any], saved: Sequence[Any]
    ) -> tuple[Any, Any, list[Any]]:
        """The cotangents of x, of s, and of the states ``before``, None for one that goes through s only."""
        raise NotImplementedError


class Elman(Cell):
    """h' = f(x + s) with f = tanh or relu (J. L. Elman, 1990)."""

    def step(self, xp: Any, x: Any, s: Any, states: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        a = x + s
        return [xp.tanh(a) if self.name == "rnn_tanh" else xp.where(a <= 0, 0.0, a)], []

    def step_grad(
        self, xp: Any, cts: Sequence[Any], before: Sequence[Any], after: Sequence[Any], saved: Sequence[Any]
    ) -> tuple[Any, Any, list[Any]]:
        (ct,), (h,) = cts, after
        ds = ct * (1.0 - h * h) if self.name == "rnn_tanh" else xp.where(h > 0, ct, 0.0)
        return ds, ds, [None]


class LSTM(Cell):
    """c' = f c + i g, h' = o tanh(c'), with sigmoid for i, f, o and tanh for g (F. A. Gers et al., 2000)."""

    def step(self, xp: Any, x: Any, s: Any, states: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        i, f, g, o = _parts(x + s, 4)
        i, f, g, o = _sigmoid(xp, i), _sigmoid(xp, f), xp.tanh(g), _sigmoid(xp, o)
        c = f * states[1] + i * g
        return [o * xp.tanh(c), c], [xp.concatenate([i, f, g, o], 1)]

    def step_grad(
        self, xp: Any, cts: Sequence[Any], before: Sequence[Any], after: Sequence[Any], saved: Sequence[Any]
    ) -> tuple[Any, Any, list[Any]]:
        i, f, g, o = _parts(saved[0], 4)
        t = xp.tanh(after[1])
        dc = cts[1] + cts[0] * o * (1.0 - t * t)
        di, df, dg, do = dc * g * i * (1.0 - i), dc * before[1] * f * (1.0 - f), dc * i * (1.0 - g * g), cts[0] * t
        ds = xp.concatenate([di, df, dg, do * o * (1.0 - o)], 1)
        return ds, ds, [None, dc * f]


class GRU(Cell):
    """h' = n + z (h - n) with n = tanh(x_n + r s_n), r and z sigmoid (K. Cho et al., 2014, as in cuDNN)."""

    def step(self, xp: Any, x: Any, s: Any, states: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        (xr, xz, xn), (sr, sz, sn) = _parts(x, 3), _parts(s, 3)
        r, z = _sigmoid(xp, xr + sr), _sigmoid(xp, xz + sz)
        n = xp.tanh(xn + r * sn)
        return [n + z * (states[0] - n)], [xp.concatenate([r, z, n, sn], 1)]

    def step_grad(
        self, xp: Any, cts: Sequence[Any], before: Sequence[Any], after: Sequence[Any], saved: Sequence[Any]
    ) -> tuple[Any, Any, list[Any]]:
        (ct,), (h,), (r, z, n, sn) = cts, before, _parts(saved[0], 4)
        dn = ct * (1.0 - z) * (1.0 - n * n)
        dr, dz = dn * sn * r * (1.0 - r), ct * (h - n) * z * (1.0 - z)
        return xp.concatenate([dr, dz, dn], 1), xp.concatenate([dr, dz, dn * r], 1), [ct * z]


CELLS: tuple[Cell, ...] = (
    Elman("rnn_tanh", 1, 1, 1, 0),
    Elman("rnn_relu", 1, 1, 1, 0),
    LSTM("lstm", 4, 1, 2, 4),
    GRU("gru", 3, 2, 1, 4),
)


def run(
    cell: Cell, xp: Any, x: Any, weight: Any, biases: Sequence[Any], first: Sequence[Any], reverse: bool
) -> list[Any]:
    """All steps of a sequence.

    Args:
        x: the input products, (N, L, gates H).
        weight: weight_hh (gates H, H).
        biases: the bias of s and, if the cell has two, that of x, (gates H,) each.
        first: the initial states, (N, H) each.
        reverse: from the last step to the first one.

    Returns:
        The hidden states of all steps (N, L, H) and the last states (N, H); of an LSTM the cell states of all steps
        (N, L, H). The numbers that the gradient needs (N, L, saved H), if there are any.
    """
    states, steps = list(first), []
    for t in _order(x.shape[1], reverse):
        x_t = x[:, t] + biases[1] if cell.biases > 1 else x[:, t]
        states, saved = cell.step(xp, x_t, states[0] @ weight.T + biases[0], states)
        steps.append([*states, *saved])
    hidden, *others = (xp.stack(by_step[::-1] if reverse else by_step, 1) for by_step in _transposed(steps))
    return [hidden, *states, *others]


def run_grad(
    cell: Cell,
    xp: Any,
    ct: Any,
    cts: Sequence[Any],
    weight: Any,
    first: Sequence[Any],
    outputs: Sequence[Any],
    reverse: bool,
) -> list[Any]:
    """The pullback of `run`.

    Args:
        ct: the cotangent of the hidden states of all steps; None for zeros.
        cts: the cotangents of the last states.
        outputs: the states of all steps, one array for each state, and what `run` saved.

    Returns:
        The cotangents of x, and of s if that differs (gru), both (N, L, gates H); the hidden states before each step
        (N, L, H), by which the cotangent of s is multiplied to that of the weight; the sums over the steps of the
        cotangents of x and s, (N, gates H), whose sums over N are the cotangents of the biases; the cotangents of the
        initial states (N, H).
    """
    states, saved = outputs[: cell.states], outputs[cell.states :]
    carried = list(cts)
    order, steps = list(_order(outputs[0].shape[1], reverse)), []
    for k in range(len(order) - 1, -1, -1):
        t = order[k]
        before = [states[i][:, order[k - 1]] if k else first[i] for i in range(cell.states)]
        at = carried if ct is None else [carried[0] + ct[:, t], *carried[1:]]
        dx, ds, carried = cell.step_grad(xp, at, before, [y[:, t] for y in states], [y[:, t] for y in saved])
        through = ds @ weight
        carried[0] = through if carried[0] is None else carried[0] + through
        steps.append([dx, before[0]] if dx is ds else [dx, ds, before[0]])
    by_array = list(_transposed(steps))
    stacked = (xp.stack(by_step if reverse else by_step[::-1], 1) for by_step in by_array)
    return [*stacked, *(reduce(add, by_step) for by_step in by_array[:-1]), *carried]


def _transposed(steps: list[list[Any]]) -> Iterable[list[Any]]:
    return map(list, zip(*steps, strict=True))


def _order(length: int, reverse: bool) -> range:
    return range(length - 1, -1, -1) if reverse else range(length)


def _parts(x: Any, count: int) -> list[Any]:
    size = x.shape[1] // count
    return [x[:, i * size : (i + 1) * size] for i in range(count)]


def _sigmoid(xp: Any, x: Any) -> Any:
    """Does not overflow, unlike 1 / (1 + exp(-x))."""
    return xp.tanh(x * 0.5) * 0.5 + 0.5


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

        def pullback(cts: Sequence[Value | None]) -> Sequence[Value | None]:
            if any(each is not None for each in cts[returned:]):  # in a derivative of the gradient
                args = x, weight, *others
                return pulled_back(partial(self.composition, **params), args, range(len(args)))(cts)
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


def _by_sequence(args: Sequence[Any], types: Sequence[Any], weights: Sequence[int], sums: Sequence[int] = ()) -> str:
    """Sequences move together: axis 0 of all arguments but the weights, and of all results but the sums."""
    sides = (
        ",".join("." * x.ndim if i in shared else "n" + "." * (x.ndim - 1) for i, x in enumerate(xs))
        for xs, shared in ((args, weights), (types, sums))
    )
    return "->".join(sides)


def _primitives(cell: Cell) -> tuple[Primitive, Primitive]:
    """The primitive of a cell, and the primitive of its gradient.

    ``cell(x, weight_hh, *biases, *initial states)`` is `run`. ``cell_grad(ct_h, weight_hh[, ct_c],
    *initial states, *outputs[, ct])`` is `run_grad`; ct_h and ct_c are cotangents of the last states.
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
        composition=rules.grad_composition,
        axes=rules.grad_axes,
        traits=(Trait.RECURRENT,),
    )
    return forward, grad


def _grad_arguments(cell: Cell, args: Sequence[Any]) -> tuple[Any, Any, Any, Any, Any]:
    """The arguments of `run_grad` from ``ct`` to ``outputs``."""
    (h, weight, *others), n = args, cell.states
    end = 3 * n - 1 + (cell.saved > 0)
    of_all = others[end] if len(others) > end else None
    return of_all, [h, *others[: n - 1]], weight, others[n - 1 : 2 * n - 1], others[2 * n - 1 : end]


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
