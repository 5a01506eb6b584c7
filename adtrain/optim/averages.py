"""Averages of the weights over the steps: what evaluation, the best epoch and exported models use."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from adtrain import ops
from adtrain.core import tree
from adtrain.core.array import Value
from adtrain.core.options import CheckedArguments
from adtrain.option_types import Fraction, Probability, Size

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
