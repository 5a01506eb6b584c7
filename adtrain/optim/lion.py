"""Lion."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np

from adtrain import ops
from adtrain.core import tree
from adtrain.core.array import Value
from adtrain.optim.optimizer import Optimizer, OptState, Tree, is_zero, zero_step, zeros_like
from adtrain.option_types import Fractions, NonNegative, Positive


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
        return {"step": zero_step(params), "exp_avg": zeros_like(params)}

    def updated(self, params: Tree, grads: Tree, state: OptState, lr: Value) -> tuple[Tree, OptState]:
        beta1, beta2 = self.betas
        mean = state["exp_avg"]
        direction = tree.map(lambda m, g: ops.sign(beta1 * m + (1 - beta1) * g), mean, grads)
        new: OptState = {
            "step": state["step"] + 1,
            "exp_avg": tree.map(lambda m, g: beta2 * m + (1 - beta2) * g, mean, grads),
        }
        if not is_zero(self.weight_decay):
            factor = 1 - self.weight_decay * ops.astype(lr, np.float64)
            params = tree.map(lambda p: ops.astype(factor, p.dtype) * p, params)
        return tree.map(lambda p, d: p - ops.astype(lr, p.dtype) * d, params, direction), new
