"""Adam, and Adam with decoupled weight decay."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np

from adtrain import ops
from adtrain.core import tree
from adtrain.core.array import Value
from adtrain.optim.optimizer import Optimizer, OptState, Tree, add_decay, is_zero, zero_step, zeros_like
from adtrain.option_types import Fractions, NonNegative, Positive


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
        averages = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if self.amsgrad else [])]
        return {"step": zero_step(params), **{name: zeros_like(params) for name in averages}}

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
        if is_zero(self.weight_decay):
            return grads, params
        factor = 1 - self.weight_decay * ops.astype(lr, np.float64)
        return grads, tree.map(lambda p: ops.astype(factor, p.dtype) * p, params)
