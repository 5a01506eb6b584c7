"""The formulas of recurrent cells, one step at a time, and the loop over the steps.

Each formula serves twice: on NumPy arrays as the reference of a primitive, and on Values as a composition of public
operations, whose derivatives have any order. ``xp`` is the module of functions: `numpy` or `adtrain.ops`.

A step gets x, its share of the input products, and s = W_hh h + b_hh, both (N, gates H) with the gates in PyTorch's
order, the hidden state h and for an LSTM the cell state c, both (N, H). It returns the new states, and what the
gradient needs again. The gradient of a step gets the cotangents of the new states. It returns those of x, of s, and of
the states as far as they do not go through s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any


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
