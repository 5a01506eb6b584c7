"""Stochastic gradient descent."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from adtrain import ops
from adtrain.core import tree
from adtrain.core.array import Value
from adtrain.core.errors import OptionError
from adtrain.optim.optimizer import Optimizer, OptState, Tree, add_decay, is_zero, zero_step, zeros_like
from adtrain.option_types import Fraction, NonNegative


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
        state: OptState = {"step": zero_step(params)}
        if self.momentum:
            state["momentum_buffer"] = zeros_like(params)
        return state

    def updated(self, params: Tree, grads: Tree, state: OptState, lr: Value) -> tuple[Tree, OptState]:
        new: OptState = {"step": state["step"] + 1}
        direction = add_decay(grads, params, self.weight_decay)
        if not is_zero(self.momentum):
            buffer = tree.map(lambda v, g: self.momentum * v + g, state["momentum_buffer"], direction)
            new["momentum_buffer"] = buffer
            direction = tree.map(lambda g, v: g + self.momentum * v, direction, buffer) if self.nesterov else buffer
        return tree.map(lambda p, d: p - ops.astype(lr, p.dtype) * d, params, direction), new
