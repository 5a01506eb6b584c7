"""The base class of optimizers: an immutable description. Its running averages are in a separate tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from adtrain import ops
from adtrain.core import options, tree
from adtrain.core.array import Value

Tree = Any
"""A tree of arrays with the structure of the parameters."""
OptState = dict[str, Any]
"""A tree of arrays: "step", the number of updates so far (int64, 0-d), and the optimizer's averages by name."""


@dataclass(frozen=True)
class Optimizer(ABC):
    """An update rule. `lr` is the base learning rate; each update takes the scheduled rate of its step."""

    lr: float

    def __post_init__(self) -> None:
        self._check("lr")

    @classmethod
    def kind(cls) -> str:
        """The optimizer's name in a config."""
        return cls.__name__.lower()

    def _check(self, name: str, low: float = 0, below: float = inf) -> None:
        options.check_number(self.kind(), name, getattr(self, name), low, below)

    @abstractmethod
    def init(self, params: Tree) -> OptState:
        """The state before the first update, on the parameters' device."""

    @abstractmethod
    def update(self, grads: Tree, state: OptState, params: Tree, lr: Value) -> tuple[Tree, OptState]:
        """The new parameters and state. `lr` (0-d) is the learning rate of this step. Pure."""


def zeros_like(params: Tree) -> Tree:
    """A tree of zeros with the parameters' shapes and dtypes."""
    return tree.map(ops.zeros_like, params)


def zero_step(params: Tree) -> Value:
    """A step count of 0 (int64, 0-d) on the parameters' device."""
    device = next((leaf.device for leaf in tree.leaves(params)), "cpu")
    return ops.zeros((), dtype=np.int64, device=device)


def add_decay(grads: Tree, params: Tree, weight_decay: float) -> Tree:
    """grads + weight_decay * params: the gradients of the loss plus weight_decay / 2 |params|²."""
    if weight_decay == 0:
        return grads
    return tree.map(lambda g, p: g + weight_decay * p, grads, params)
