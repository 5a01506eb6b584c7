"""The base class of optimizers: an immutable description. Its averages are in a separate tree.

Also: parameters that are updated in parts, clipping of gradients, and averages of the weights over the steps, which
evaluation, the best epoch and exported models use.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, NamedTuple

import numpy as np

from adtrain import ops
from adtrain.core import tree
from adtrain.core.array import TracedNumber, Value
from adtrain.core.errors import OptionError, ShapeError
from adtrain.core.operators import OF_PYTORCH_OPTIMIZERS
from adtrain.core.options import CheckedArguments, check_option, checked_options
from adtrain.core.trace import phase
from adtrain.core.types import Shape
from adtrain.option_types import Fraction, NonNegative, Positive, Probability, Size

Tree = Any
"""A tree of arrays with the structure of the parameters."""
OptState = dict[str, Any]
"""A tree of arrays: "step", the number of updates so far (int64, 0-d), and the optimizer's averages by name."""


ACCEPTED, LOSS, STOPPED = "accepted", "loss", "stopped"
"""Keys of the state of an optimizer with a line search: the last parameters that it has accepted, the loss there, and
whether it stays there, as its line search finds no better ones, bool (). The parameters that `update` returns are those
of a trial."""


@dataclass(frozen=True)
class Optimizer(CheckedArguments):
    """An update rule. `lr` is the learning rate of updates that are given none."""

    elementwise: ClassVar[bool] = False
    """Whether the update of an element depends on that element, its gradient and its averages only. Then ranks divide
    the update and the averages among themselves."""
    needs_loss: ClassVar[bool] = False
    """Whether `update` needs the loss. The state then has ACCEPTED, LOSS and STOPPED."""
    instead = OF_PYTORCH_OPTIMIZERS
    left_out = ("params", Iterable, "the parameters are arguments of init and update")
    traceable: ClassVar[tuple[str, ...]] = ()
    """Options that may be traced numbers in `update`, in addition to `lr`."""
    lr: Positive

    def numbers(self) -> dict[str, Any]:
        """The options that a Program can take as arrays, by name: `lr` and those of `traceable`."""
        return {name: getattr(self, name) for name in ("lr", *self.traceable)}

    def with_traced(self, numbers: Mapping[str, Any]) -> Optimizer:
        """A copy whose options `numbers`, of those of `numbers()`, are traced numbers or values. Nothing is checked.

        An option that is 0 may leave an operation out, so a number that stands for 0 is not the same as the option 0.
        """
        changed = copy.copy(self)
        for name, number in numbers.items():
            object.__setattr__(changed, name, number)
        return changed

    def label(self, path: str) -> Hashable:
        """The label of the parameter at this path. Parameters with equal labels are updated by the same numbers."""
        return None

    def trains(self, path: str) -> bool:
        """Whether the parameter at this path is trained."""
        return True

    def trained(self, params: Tree) -> Tree:
        """The part of a tree of parameters that is trained; `init` and `update` take the whole tree or this part."""
        return params

    def merged(self, params: Tree, trained: Tree) -> Tree:
        """The tree `params` with the arrays of `trained`, a tree as `trained` returns it."""
        return trained

    def require_fit(self, shapes: Mapping[str, Shape]) -> None:
        """Raise OptionError where an option does not fit parameters of these shapes, by path."""
        return

    def rate_at(self, step: int, lr: float) -> float:
        """The learning rate in the update after `step` updates, which is given `lr`; `sequence` multiplies that."""
        return lr

    @abstractmethod
    def init(self, params: Tree) -> OptState:
        """The state before the first update, on the parameters' device."""

    def update(
        self,
        params: Tree,
        grads: Tree,
        state: OptState,
        lr: Value | TracedNumber | float | None = None,
        loss: Value | None = None,
    ) -> tuple[Tree, OptState]:
        """The new parameters and state. Pure: the arguments are not changed.

        Args:
            params, grads: trees of one structure.
            state: from `init` or the last update.
            lr: the learning rate of this update, a number or a 0-d array; the optimizer's own by default.
            loss: the loss at `params`, a 0-d array, which `lbfgs` needs.

        Raises:
            ShapeError: the trees differ in structure. OptionError: `lr` is not a finite number of at least 0, or
                `state` is not a state of an optimizer.
        """
        structure = tree.flatten(params)[1]
        if tree.flatten_like(structure, grads) is None:
            raise ShapeError(
                f"{self.kind()}: found parameters of structure {structure} and gradients of structure "
                f"{tree.flatten(grads)[1]}, expected the same: write update(params, grads, state)"
            )
        rate = self.lr if lr is None else lr
        if isinstance(rate, TracedNumber):
            rate = rate.value
        elif not isinstance(rate, Value):
            check_option(self.kind(), "lr", rate, NonNegative)
            rate = ops.full((), float(rate), np.float64, device_of(params))
        if "step" not in state:
            raise OptionError(
                f"{self.kind()}: step is not in the state, expected the state from init or the last update"
            )
        with phase("update"):
            if self.needs_loss and loss is not None:
                return self.updated_by_loss(params, grads, state, rate, loss)
            return self.updated(params, grads, state, rate)

    @abstractmethod
    def updated(self, params: Tree, grads: Tree, state: OptState, lr: Value) -> tuple[Tree, OptState]:
        """`update` with the learning rate as a 0-d value."""

    def updated_by_loss(
        self, params: Tree, grads: Tree, state: OptState, lr: Value, loss: Value
    ) -> tuple[Tree, OptState]:
        """`updated` of an optimizer that needs the loss."""
        raise NotImplementedError


def device_of(params: Tree) -> str:
    """The device of the arrays; "cpu" if there are none."""
    return next((leaf.device for leaf in tree.leaves(params)), "cpu")


def zeros_like(params: Tree) -> Tree:
    """A tree of zeros with the parameters' shapes and dtypes."""
    return tree.map(ops.zeros_like, params)


def zero_step(params: Tree) -> Value:
    """A step count of 0 (int64, 0-d) on the parameters' device."""
    return ops.zeros((), dtype=np.int64, device=device_of(params))


def initial_state(params: Tree, *averages: str) -> OptState:
    """A step count of 0, and zeros in place of the averages."""
    return {"step": zero_step(params), **{name: zeros_like(params) for name in averages}}


def is_zero(option: Any) -> bool:
    """Whether an option is the number 0. A traced number is not."""
    return isinstance(option, (int, float)) and option == 0


def add_decay(grads: Tree, params: Tree, weight_decay: float) -> Tree:
    """grads + weight_decay * params: the gradients of the loss plus weight_decay / 2 |params|²."""
    if is_zero(weight_decay):
        return grads
    return tree.map(lambda g, p: g + weight_decay * p, grads, params)


def decayed(params: Tree, weight_decay: float, lr: Value) -> Tree:
    """(1 - lr weight_decay) params."""
    if is_zero(weight_decay):
        return params
    factor = 1 - weight_decay * ops.astype(lr, np.float64)
    return tree.map(lambda p: ops.astype(factor, p.dtype) * p, params)


def named(params: Tree) -> dict[str, Any]:
    """The arrays of a tree by path."""
    return dict(zip(tree.paths(params), tree.leaves(params), strict=True))


class Part(NamedTuple):
    """Parameters that are updated together, by `init` and `updated` as those of an Optimizer, at the rate `lr`."""

    paths: Sequence[str]
    init: Callable[[Tree], OptState]
    updated: Callable[[Tree, Tree, OptState, Value], tuple[Tree, OptState]]
    lr: Any


def initial_in_parts(params: Tree, parts: Iterable[Part]) -> OptState:
    """The state before the first update, of parameters that are updated in parts: their trees are dicts by path."""
    given, state = named(params), dict[str, Any]()
    for part in parts:
        for name, x in part.init({path: given[path] for path in part.paths}).items():
            state[name] = {**state.get(name, {}), **x} if isinstance(x, dict) else x
    return state


def updated_in_parts(params: Tree, grads: Tree, state: OptState, parts: Iterable[Part]) -> tuple[Tree, OptState]:
    """`updated` of parameters that are updated in parts. They share a state that is no dict by path, such as "step"."""
    arrays, gradients, structure = named(params), named(grads), tree.flatten(params)[1]
    new = dict(state)

    def by_path(x: Any) -> bool:
        return isinstance(x, dict) and x.keys() <= arrays.keys()

    for part in parts:
        if part.paths:

            def own(x: Mapping[str, Any], paths: Sequence[str] = part.paths) -> dict[str, Any]:
                return {path: x[path] for path in paths if path in x}

            of_part = {name: own(x) if by_path(x) else x for name, x in state.items()}
            moved, after = part.updated(own(arrays), own(gradients), of_part, part.lr)
            arrays |= moved
            for name, x in after.items():
                new[name] = {**new[name], **x} if by_path(x) else x
    return tree.unflatten(structure, list(arrays.values())), new


@checked_options
def clip_by_norm(grads: Tree, max_norm: Positive, norm: Value | None = None) -> tuple[Tree, Value]:
    """The gradients scaled so that their norm is at most `max_norm`, and their norm before scaling (0-d).

    The norm is the Euclidean norm of all leaves as one vector (Pascanu et al. 2013), as in
    torch.nn.utils.clip_grad_norm_. With `norm`, `grads` are a part of the gradients that have this norm. Raises
    OptionError if `max_norm` is not above 0 or there are no gradients.
    """
    leaves = tree.leaves(grads)
    if not leaves:
        raise OptionError("clip_by_norm: found no gradients, expected at least one")
    if norm is None:
        norm = ops.sqrt(reduce(ops.add, [ops.sum(ops.square(g)) for g in leaves]))
    scale = ops.minimum(max_norm / (norm + 1e-6), 1.0)  # 1e-6 as in PyTorch: no division by a norm of zero
    return tree.map(lambda g: ops.astype(scale, g.dtype) * g, grads), norm


@checked_options
def clip_by_value(grads: Tree, limit: Positive) -> Tree:
    """The gradients with every element clamped to [-limit, limit]. Raises OptionError if `limit` is not above 0."""
    return tree.map(lambda g: ops.clip(g, -limit, limit), grads)


AverageState = dict[str, Any]
"""The averages: "params" and "statistics", trees like the parameters and the running statistics."""


class Average(CheckedArguments):
    """An average of weights. Subclasses are frozen dataclasses."""

    def init(self, params: Any, statistics: Any) -> AverageState:
        """The state before the first step: the initial weights."""
        return {"params": params, "statistics": statistics}

    @abstractmethod
    def updated(self, params: Any, statistics: Any, average: AverageState, step: Value) -> tuple[Any, AverageState]:
        """The weights and the average after a step: `step`, int64 (), counts from 0, and `params` are its result."""


@dataclass(frozen=True)
class EMA(Average):
    """Exponential moving average: decay a + (1 - decay) p after each step, as torch.optim.swa_utils.get_ema_avg_fn.

    After the first step it is p. Running statistics are averaged, too.
    """

    decay: Fraction = 0.999

    def updated(self, params: Any, statistics: Any, average: AverageState, step: Value) -> tuple[Any, AverageState]:
        kept = ops.where(ops.equal(step, 0), 0.0, ops.full((), self.decay, np.float64, step.device))

        def mean(a: Value, p: Value) -> Value:
            if not np.issubdtype(p.dtype, np.floating):
                return p
            return ops.astype(kept, p.dtype) * a + ops.astype(1 - kept, p.dtype) * p

        return params, tree.map(mean, average, {"params": params, "statistics": statistics})


@dataclass(frozen=True)
class Lookahead(Average):
    """Slow weights: after every `steps` steps s ← s + alpha (p - s), and p ← s (Zhang et al. 2019).

    Running statistics are the latest ones.
    """

    steps: Size = 5
    alpha: Probability = 0.5

    def updated(self, params: Any, statistics: Any, average: AverageState, step: Value) -> tuple[Any, AverageState]:
        due = ops.equal(ops.remainder(step + 1, self.steps), 0)
        slow = tree.map(lambda s, p: ops.where(due, s + self.alpha * (p - s), s), average["params"], params)
        fast = tree.map(lambda s, p: ops.where(due, s, p), slow, params)
        return fast, {"params": slow, "statistics": statistics}


AVERAGES: dict[str, type[Average]] = {average.kind(): average for average in (EMA, Lookahead)}
"""Averages by their name in a config."""
