"""L-BFGS, and one optimizer after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from adtrain import ops
from adtrain.core import tree
from adtrain.core.array import Value
from adtrain.core.errors import OptionError
from adtrain.core.views import subview
from adtrain.optim.elementwise import Adam
from adtrain.optim.optimizer import ACCEPTED, LOSS, STOPPED, Optimizer, OptState, Tree, device_of, zero_step, zeros_like
from adtrain.option_types import Positive, Size

SUFFICIENT, CURVATURE = 1e-4, 0.9
"""The constants of the Wolfe conditions, as in Nocedal and Wright, "Numerical Optimization" (2006), chapter 3."""
NOISE = 8
"""The assumed rounding error of a loss, relative to it, in units of the machine epsilon of its dtype."""


@dataclass(frozen=True)
class LBFGS(Optimizer):
    """L-BFGS (Liu and Nocedal 1989) with a line search that ends at the weak Wolfe conditions.

    A step of the training is one evaluation of the loss and its gradient, at a trial point x + t d. If the loss there
    is at most f(x) + 1e-4 t f'(x; d), and the slope f'(x + t d; d) at least 0.9 f'(x; d), it is the next point; a step
    t of `lr` in the new direction follows. Otherwise t is halved between the bounds that are known, or doubled while
    there is no upper one (Lewis and Overton 2013). Near a minimum the change of the loss is lost in its rounding error.
    So a loss that exceeds f(x) by at most this error is also low enough if the slope there is at most
    (1 - 2e-4) |f'(x; d)| (the approximate Wolfe conditions of Hager and Zhang 2005).

    After `max_evaluations` trials the search has failed. Then the stored differences are dropped, and the next
    direction is the negative gradient at x. If the search in this direction fails, too, the optimizer stops: it stays
    at x. This is how SciPy's L-BFGS-B ends with ABNORMAL_TERMINATION_IN_LNSRCH.

    It minimises one function, so all steps need the same batch. The loss of a step is that of the last point that was
    accepted, and the model is that point. The numbers are computed in float64.

    State: "step"; "accepted", the point x; "loss", "gradient", "direction" and "slope" there, "step_length",
    "lower" and "upper" (0: none) bounds of it, "evaluations" in this direction (-1 before the first), "stopped", the
    last `history` differences "points" and "gradients" (history, n), oldest first, "inner", their inner products, 0 for
    unused ones, "triangle", see `product_with_inverse`, and "scale", the factor of the initial inverse Hessian.
    """

    needs_loss = True
    lr: Positive = 1.0
    _: KW_ONLY
    history: Size = 10
    max_evaluations: Size = 20

    def init(self, params: Tree) -> OptState:
        device, n = device_of(params), sum(x.size for x in tree.leaves(params))

        def zeros(*shape: int) -> Value:
            return ops.zeros(shape, np.float64, device)

        return {
            "step": zero_step(params),
            ACCEPTED: zeros_like(params),
            LOSS: zeros(),
            **{name: zeros(n) for name in ("gradient", "direction")},
            **{name: zeros() for name in ("slope", "step_length", "lower", "upper", "scale")},
            "evaluations": ops.full((), -1, np.int64, device),
            STOPPED: ops.zeros((), np.bool_, device),
            **{name: zeros(self.history, n) for name in ("points", "gradients")},
            "inner": zeros(self.history),
            "triangle": zeros(self.history, self.history),
        }

    def updated(self, params: Tree, grads: Tree, state: OptState, lr: Value) -> tuple[Tree, OptState]:
        raise OptionError("lbfgs: the loss is missing, expected update(params, grads, state, loss=loss)")

    def updated_by_loss(
        self, params: Tree, grads: Tree, state: OptState, lr: Value, loss: Value
    ) -> tuple[Tree, OptState]:
        base, trial, gradient = flat(state[ACCEPTED]), flat(params), flat(grads)
        value, t = ops.astype(loss, np.float64), state["step_length"]
        slope = dot(gradient, state["direction"])
        noise = NOISE * float(np.finfo(loss.dtype).eps) * ops.abs(state[LOSS])
        as_low = (value <= state[LOSS] + noise) & (slope <= (2 * SUFFICIENT - 1) * state["slope"])
        low_enough = (value <= state[LOSS] + SUFFICIENT * t * state["slope"]) | as_low
        flat_enough = slope >= CURVATURE * state["slope"]
        first = state["evaluations"] < 0
        accepted = first | (low_enough & flat_enough)
        failed = ~accepted & (state["evaluations"] + 1 >= self.max_evaluations)
        is_steepest = ~(state["inner"][-1] > 0)
        stopped = state[STOPPED] | (failed & is_steepest)

        moved, changed = trial - base, gradient - state["gradient"]
        inner = dot(moved, changed)
        useful = accepted & ~first & (inner > 0)
        points = appended(state["points"], moved, useful)
        triangle = ops.where(useful, bordered(state["triangle"], points, changed, inner), state["triangle"])
        pairs = {
            "points": points,
            "gradients": appended(state["gradients"], changed, useful),
            "inner": ops.where(failed, 0.0, appended(state["inner"], inner, useful)),
            "triangle": ops.where(failed, 0.0, triangle),
        }
        scale = ops.where(useful, inner / ops.where(useful, dot(changed, changed), 1.0), state["scale"])

        x = ops.where(accepted, trial, base)
        at_x = ops.where(accepted, gradient, state["gradient"])
        steepest = 1.0 / ops.maximum(1.0, ops.sum(ops.abs(at_x)))
        known = pairs["inner"][-1] > 0
        direction = -1.0 * product_with_inverse(at_x, pairs, ops.where(known, scale, steepest))
        direction = ops.where(accepted | failed, direction, state["direction"])

        lower = ops.where(low_enough, t, state["lower"])
        upper = ops.where(low_enough, state["upper"], t)
        between = ops.where(upper > 0, 0.5 * (lower + upper), 2.0 * t)
        restart = accepted | failed
        step_length = ops.where(stopped, 0.0, ops.where(restart, ops.astype(lr, np.float64), between))
        new: OptState = {
            "step": state["step"] + 1,
            ACCEPTED: tree.map(lambda new, old: ops.where(accepted, new, old), params, state[ACCEPTED]),
            LOSS: ops.where(accepted, value, state[LOSS]),
            "gradient": at_x,
            "direction": direction,
            "slope": ops.where(restart, dot(at_x, direction), state["slope"]),
            "step_length": step_length,
            "lower": ops.where(restart, 0.0, lower),
            "upper": ops.where(restart, 0.0, upper),
            "scale": scale,
            "evaluations": ops.where(restart, 0, state["evaluations"] + 1),
            STOPPED: stopped,
            **pairs,
        }
        return like(x + step_length * direction, params), new


FIRST, THEN = Adam(1e-3), LBFGS()
"""The optimizers of a sequence by default."""


@dataclass(frozen=True)
class Sequence(Optimizer):
    """One optimizer for a number of steps, then another: by default Adam, then L-BFGS.

    `lr` is a factor on the learning rates of both. State: "step"; that of both, with names that begin with "first." and
    "then."; with `lbfgs` as `then` also "accepted", "loss" and "stopped", as it has them.
    """

    traceable: ClassVar[tuple[str, ...]] = ()
    lr: Positive = 1.0
    _: KW_ONLY
    first: Optimizer = FIRST
    steps: Size = 1000
    then: Optimizer = THEN

    def __post_init__(self) -> None:
        if self.first.needs_loss:
            raise OptionError(f"sequence: first is {self.first.kind()}, expected an optimizer without a line search")

    @property
    def needs_loss(self) -> bool:  # type: ignore[override]
        return self.then.needs_loss

    def numbers(self) -> dict[str, Any]:
        return {
            "lr": self.lr,
            **{f"first.{name}": x for name, x in self.first.numbers().items()},
            **{f"then.{name}": x for name, x in self.then.numbers().items()},
        }

    def rate_at(self, step: int, lr: float) -> float:
        used, done = (self.first, 0) if step < self.steps else (self.then, self.steps)
        return used.rate_at(step - done, lr * used.lr)

    def with_traced(self, numbers: Mapping[str, Any]) -> Optimizer:
        found: dict[str, Any] = {name: x for name, x in numbers.items() if "." not in name}
        for part in ("first", "then"):
            own = {name.partition(".")[2]: x for name, x in numbers.items() if name.startswith(f"{part}.")}
            found[part] = getattr(self, part).with_traced(own)
        return super().with_traced(found)

    def init(self, params: Tree) -> OptState:
        found: OptState = {"step": zero_step(params)}
        for part, optimizer in (("first", self.first), ("then", self.then)):
            found |= {f"{part}.{name}": x for name, x in optimizer.init(params).items()}
        if self.needs_loss:
            found[LOSS] = ops.zeros((), np.float64, device_of(params))
            found[ACCEPTED] = zeros_like(params)
            found[STOPPED] = ops.zeros((), np.bool_, device_of(params))
        return found

    def updated(self, params: Tree, grads: Tree, state: OptState, lr: Value) -> tuple[Tree, OptState]:
        return self.updated_by_loss(params, grads, state, lr, None)

    def updated_by_loss(
        self, params: Tree, grads: Tree, state: OptState, lr: Value, loss: Value | None
    ) -> tuple[Tree, OptState]:
        """Both updates are computed, and one is taken: a Program has no branches."""
        is_first = state["step"] < self.steps

        def chosen(first: Any, then: Any) -> Any:
            return tree.map(lambda x, y: ops.where(is_first, x, y), first, then)

        found: dict[str, tuple[Tree, OptState]] = {}
        new: OptState = {"step": state["step"] + 1}
        for part, optimizer in (("first", self.first), ("then", self.then)):
            own = {name.partition(".")[2]: x for name, x in state.items() if name.startswith(f"{part}.")}
            rate = lr * optimizer.lr
            if optimizer.needs_loss and loss is not None:
                found[part] = optimizer.updated_by_loss(params, grads, own, rate, loss)
            else:
                found[part] = optimizer.updated(params, grads, own, rate)
            after = found[part][1]
            kept = (after, own) if part == "first" else (own, after)
            new |= {f"{part}.{name}": chosen(*(x[name] for x in kept)) for name in own}
        if loss is not None:
            after = found["then"][1]
            new[ACCEPTED] = chosen(found["first"][0], after[ACCEPTED])
            new[LOSS] = ops.where(is_first, ops.astype(loss, np.float64), after[LOSS])
            new[STOPPED] = ~is_first & after[STOPPED]
        return chosen(found["first"][0], found["then"][0]), new


def flat(values: Tree) -> Value:
    """The numbers of a tree as one vector in float64."""
    return ops.concatenate([ops.reshape(ops.astype(x, np.float64), (-1,)) for x in tree.leaves(values)])


def like(vector: Value, values: Tree) -> Tree:
    """A vector as a tree with the structure, shapes and dtypes of `values`."""
    leaves, structure = tree.flatten(values)
    found, start = [], 0
    for x in leaves:
        found.append(ops.astype(subview(vector, start, x.shape), x.dtype))
        start += prod(x.shape)
    return tree.unflatten(structure, found)


def dot(a: Value, b: Value) -> Value:
    return ops.sum(a * b)


def appended(rows: Value, row: Value, condition: Value) -> Value:
    """The rows without the first one, and `row` at the end, if the condition holds; otherwise the rows."""
    last = ops.reshape(row, (1, *rows.shape[1:]))
    later = ops.slice(rows, [1, *(0 for _ in row.shape)], list(rows.shape))
    return ops.where(condition, ops.concatenate([later, last]), rows)


def product(matrix: Value, vector: Value, transpose: bool = False) -> Value:
    """The product of a matrix, or its transpose, with a vector."""
    return ops.reshape(ops.matmul(matrix, ops.reshape(vector, (-1, 1)), transpose_a=transpose), (-1,))


def bordered(triangle: Value, points: Value, changed: Value, inner: Value) -> Value:
    """The inverse of R, see `product_with_inverse`, without the oldest row and column, and with those of a new pair.

    The inverse of a triangular matrix without its first row and column is the rest of its inverse. `points` has the
    new difference in its last row; `changed` is that of the gradients, and `inner` their product.
    """
    m = points.shape[0]
    rest = ops.concatenate([ops.slice(triangle, [1, 1], [m, m]), ops.zeros((m - 1, 1), np.float64, points.device)], 1)
    rest = ops.concatenate([rest, ops.zeros((1, m), np.float64, points.device)])
    last = ops.equal(ops.arange(m, device=points.device), m - 1)
    column = (ops.astype(last, np.float64) - product(rest, product(points, changed))) / ops.where(inner > 0, inner, 1.0)
    return ops.where(last, ops.reshape(column, (-1, 1)), rest)


def product_with_inverse(gradient: Value, pairs: Mapping[str, Value], scale: Value) -> Value:
    """The product of the approximate inverse Hessian with a vector (n,), in its compact form (Byrd, Nocedal and
    Schnabel 1994, theorem 2.2), which has a few products of matrices in place of a loop over the pairs.

    `pairs` are "points" S, "gradients" Y, "inner" and "triangle" of the state of LBFGS; `scale` is the initial inverse
    Hessian. The triangle is the inverse of R, the upper triangle of S Yᵀ. It is 0 in rows and columns of unused pairs.
    """
    points, gradients, triangle = pairs["points"], pairs["gradients"], pairs["triangle"]
    u = product(triangle, product(points, gradient))
    along = product(gradients, u, transpose=True)
    v = pairs["inner"] * u + scale * product(gradients, along - gradient)
    return scale * (gradient - along) + product(points, product(triangle, v, transpose=True), transpose=True)
