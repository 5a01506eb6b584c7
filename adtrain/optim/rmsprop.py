"""RMSprop."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from adtrain import ops
from adtrain.core import tree
from adtrain.core.array import Value
from adtrain.optim.optimizer import Optimizer, OptState, Tree, add_decay, is_zero, zero_step, zeros_like
from adtrain.option_types import Fraction, NonNegative, Positive


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
        state: OptState = {"step": zero_step(params), "square_avg": zeros_like(params)}
        if self.momentum:
            state["momentum_buffer"] = zeros_like(params)
        return state

    def updated(self, params: Tree, grads: Tree, state: OptState, lr: Value) -> tuple[Tree, OptState]:
        grads = add_decay(grads, params, self.weight_decay)
        square = tree.map(lambda s, g: self.alpha * s + (1 - self.alpha) * ops.square(g), state["square_avg"], grads)
        direction = tree.map(lambda g, s: g / (ops.sqrt(s) + self.eps), grads, square)
        new: OptState = {"step": state["step"] + 1, "square_avg": square}
        if not is_zero(self.momentum):
            direction = tree.map(lambda v, d: self.momentum * v + d, state["momentum_buffer"], direction)
            new["momentum_buffer"] = direction
        return tree.map(lambda p, d: p - ops.astype(lr, p.dtype) * d, params, direction), new
