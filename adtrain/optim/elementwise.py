"""Optimizers that update each element on its own: SGD, RMSprop, Adam, AdamW and Lion."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np

from adtrain import ops
from adtrain.core import tree
from adtrain.core.array import Value
from adtrain.core.errors import OptionError
from adtrain.optim.optimizer import Optimizer, OptState, Tree, add_decay, decayed, initial_state, is_zero
from adtrain.option_types import Fraction, Fractions, NonNegative, Positive


@dataclass(frozen=True)
class SGD(Optimizer):
    """p ← p - lr g, with momentum and Nesterov's variant as torch.optim.SGD defines them (Sutskever et al. 2013).

    State: "step", and with momentum "momentum_buffer".
    """

    elementwise = True
    traceable: ClassVar[tuple[str, ...]] = ("momentum", "weight_decay")
    _: KW_ONLY
    momentum: Fraction = 0.0
    weight_decay: NonNegative = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if self.nesterov and self.momentum == 0:
            raise OptionError("sgd: nesterov needs a momentum above 0")

    def init(self, params: Tree) -> OptState:
        return initial_state(params, *(["momentum_buffer"] if self.momentum else []))

    def updated(self, params: Tree, grads: Tree, state: OptState, lr: Value) -> tuple[Tree, OptState]:
        new: OptState = {"step": state["step"] + 1}
        direction = add_decay(grads, params, self.weight_decay)
        if not is_zero(self.momentum):
            buffer = tree.map(lambda v, g: self.momentum * v + g, state["momentum_buffer"], direction)
            new["momentum_buffer"] = buffer
            direction = tree.map(lambda g, v: g + self.momentum * v, direction, buffer) if self.nesterov else buffer
        return tree.map(lambda p, d: p - ops.astype(lr, p.dtype) * d, params, direction), new


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """The gradient divided by the root of its running mean square (Tieleman and Hinton 2012), as torch.optim.RMSprop.

    State: "step", "square_avg", and with momentum "momentum_buffer".
    """

    elementwise = True
    traceable: ClassVar[tuple[str, ...]] = ("alpha", "eps", "weight_decay", "momentum")
    lr: Positive = 1e-2
    _: KW_ONLY
    alpha: Fraction = 0.99
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    momentum: Fraction = 0.0

    def init(self, params: Tree) -> OptState:
        return initial_state(params, "square_avg", *(["momentum_buffer"] if self.momentum else []))

    def updated(self, params: Tree, grads: Tree, state: OptState, lr: Value) -> tuple[Tree, OptState]:
        grads = add_decay(grads, params, self.weight_decay)
        square = tree.map(lambda s, g: self.alpha * s + (1 - self.alpha) * ops.square(g), state["square_avg"], grads)
        direction = tree.map(lambda g, s: g / (ops.sqrt(s) + self.eps), grads, square)
        new: OptState = {"step": state["step"] + 1, "square_avg": square}
        if not is_zero(self.momentum):
            direction = tree.map(lambda v, d: self.momentum * v + d, state["momentum_buffer"], direction)
            new["momentum_buffer"] = direction
        return tree.map(lambda p, d: p - ops.astype(lr, p.dtype) * d, params, direction), new


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015), in the paper's form with the bias corrections folded into lr and eps.

    Weight decay is added to the gradient, as in torch.optim.Adam. With `amsgrad` the step is divided by the root of the
    largest mean square so far (Reddi et al. 2018). State: "step", "exp_avg", "exp_avg_sq", and with `amsgrad`
    "max_exp_avg_sq".
    """

    elementwise = True
    traceable: ClassVar[tuple[str, ...]] = ("betas", "eps", "weight_decay")
    lr: Positive = 1e-3
    _: KW_ONLY
    betas: Fractions = (0.9, 0.999)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    amsgrad: bool = False

    def init(self, params: Tree) -> OptState:
        return initial_state(params, "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if self.amsgrad else []))

    def updated(self, params: Tree, grads: Tree, state: OptState, lr: Value) -> tuple[Tree, OptState]:
        grads, params = self._decay(grads, params, lr)
        beta1, beta2 = self.betas
        step = state["step"] + 1
        mean = tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state["exp_avg"], grads)
        square = tree.map(lambda v, g: beta2 * v + (1 - beta2) * ops.square(g), state["exp_avg_sq"], grads)
        new: OptState = {"step": step, "exp_avg": mean, "exp_avg_sq": square}
        if self.amsgrad:
            square = new["max_exp_avg_sq"] = tree.map(ops.maximum, state["max_exp_avg_sq"], square)

        # In float64, because in float32 1 - 0.999 ** step loses half of its digits in the first steps.
        t = ops.astype(step, np.float64)
        correction = ops.sqrt(1 - ops.power(beta2, t))
        rate = ops.astype(lr, np.float64) * correction / (1 - ops.power(beta1, t))
        eps = self.eps * correction

        def updated(p: Value, m: Value, v: Value) -> Value:
            return p - ops.astype(rate, p.dtype) * m / (ops.sqrt(v) + ops.astype(eps, p.dtype))

        return tree.map(updated, params, mean, square), new

    def _decay(self, grads: Tree, params: Tree, lr: Value) -> tuple[Tree, Tree]:
        return add_decay(grads, params, self.weight_decay), params


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay: p ← (1 - lr weight_decay) p (Loshchilov and Hutter 2019)."""

    _: KW_ONLY
    weight_decay: NonNegative = 1e-2

    def _decay(self, grads: Tree, params: Tree, lr: Value) -> tuple[Tree, Tree]:
        return grads, decayed(params, self.weight_decay, lr)


@dataclass(frozen=True)
class Lion(Optimizer):
    """p ← (1 - lr weight_decay) p - lr sign(β₁ m + (1 - β₁) g), then m ← β₂ m + (1 - β₂) g (Chen et al. 2023).

    State: "step", "exp_avg".
    """

    elementwise = True
    traceable: ClassVar[tuple[str, ...]] = ("betas", "weight_decay")
    lr: Positive = 1e-4
    _: KW_ONLY
    betas: Fractions = (0.9, 0.99)
    weight_decay: NonNegative = 0.0

    def init(self, params: Tree) -> OptState:
        return initial_state(params, "exp_avg")

    def updated(self, params: Tree, grads: Tree, state: OptState, lr: Value) -> tuple[Tree, OptState]:
        beta1, beta2 = self.betas
        mean = state["exp_avg"]
        direction = tree.map(lambda m, g: ops.sign(beta1 * m + (1 - beta1) * g), mean, grads)
        new: OptState = {
            "step": state["step"] + 1,
            "exp_avg": tree.map(lambda m, g: beta2 * m + (1 - beta2) * g, mean, grads),
        }
        params = decayed(params, self.weight_decay, lr)
        return tree.map(lambda p, d: p - ops.astype(lr, p.dtype) * d, params, direction), new
