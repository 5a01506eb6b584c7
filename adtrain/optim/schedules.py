"""Learning-rate schedules: the factor on the base rate at each step; step 0 is the first update.

A factor is a float64 0-d Value, computed by public ops from an int64 0-d Value, so it is traced with the training step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import pi
from typing import Any

import numpy as np

from adtrain import ops
from adtrain.core.array import Value, array
from adtrain.core.options import CheckedArguments
from adtrain.option_types import AtLeastOne, Count, Fraction, NonNegative, Positive, Probability, Size, StepList, Steps

HIGH = 1e300
"""Stands for the lowest loss before the first epoch ends."""
MAX_STEPS = 2.0**53
"""float64 cannot tell larger numbers of steps apart."""


class Schedule(CheckedArguments):
    """A factor on the base learning rate for each step. Subclasses are frozen dataclasses; their unit is the step."""

    @abstractmethod
    def __call__(self, step: Value) -> Value:
        """The factor (float64, 0-d) for the update after `step` (integer, 0-d) updates."""


@dataclass(frozen=True)
class Constant(Schedule):
    """Always 1."""

    def __call__(self, step: Value) -> Value:
        return ops.ones_like(_float(step))


@dataclass(frozen=True)
class Step(Schedule):
    """gamma ** (step // step_size)."""

    step_size: Steps
    gamma: NonNegative = 0.1

    def __call__(self, step: Value) -> Value:
        periods = ops.astype(_float(step) / self.step_size, np.int64)
        return ops.power(self.gamma, _float(periods))


@dataclass(frozen=True)
class MultiStep(Schedule):
    """gamma ** (number of milestones at or before the step)."""

    milestones: StepList
    gamma: NonNegative = 0.1

    def __call__(self, step: Value) -> Value:
        reached = ops.greater_equal(_float(step), np.array(self.milestones, np.float64))
        return ops.power(self.gamma, ops.sum(_float(reached)))


@dataclass(frozen=True)
class Exponential(Schedule):
    """gamma ** step."""

    gamma: NonNegative

    def __call__(self, step: Value) -> Value:
        return ops.power(self.gamma, _float(step))


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from 1 at step 0 to `final` at `total_steps`, then `final` (Loshchilov and Hutter 2017)."""

    total_steps: Size
    final: NonNegative = 0.0

    def __call__(self, step: Value) -> Value:
        return _anneal(1.0, self.final, _float(step) / self.total_steps)


@dataclass(frozen=True)
class CosineRestarts(Schedule):
    """Half a cosine from 1 to `final` in each period (Loshchilov and Hutter 2017), as CosineAnnealingWarmRestarts.

    A period is `period_factor` times as long as the one before it. PyTorch names these options T_0 and T_mult.
    """

    period: Steps
    period_factor: Size = 1
    final: NonNegative = 0.0

    @classmethod
    def kind(cls) -> str:
        return "cosine_restarts"

    def __call__(self, step: Value) -> Value:
        t = _float(step)
        if self.period_factor == 1:
            return _anneal(1.0, self.final, ops.remainder(t, self.period) / self.period)
        lengths, starts = [float(self.period)], [0.0]
        while starts[-1] + lengths[-1] < MAX_STEPS:
            starts.append(starts[-1] + lengths[-1])
            lengths.append(lengths[-1] * self.period_factor)
        begun = _float(ops.greater_equal(t, np.array(starts)))  # 1 for the periods up to the present one
        start, length = (ops.sum(begun * np.diff([0.0, *x])) for x in (starts, lengths))
        return _anneal(1.0, self.final, (t - start) / length)


@dataclass(frozen=True)
class Polynomial(Schedule):
    """final + (1 - final) (1 - step / total_steps) ** power, as PolynomialLR of PyTorch; with power 1 a line."""

    total_steps: Size
    power: Positive = 1.0
    final: NonNegative = 0.0

    def __call__(self, step: Value) -> Value:
        left = 1.0 - ops.clip(_float(step) / self.total_steps, 0.0, 1.0)
        return self.final + (1.0 - self.final) * ops.power(left, self.power)


@dataclass(frozen=True)
class Triangular(Schedule):
    """Cycles of a rise from `lowest` to 1 and a fall to `lowest` (Smith 2017), as torch.optim.lr_scheduler.CyclicLR.

    The fall takes as long as the rise if `step_size_down` is None.
    """

    step_size_up: Steps
    step_size_down: Steps | None = None
    lowest: Probability = 0.1

    def __call__(self, step: Value) -> Value:
        up, down = self.step_size_up, self.step_size_down or self.step_size_up
        t = ops.remainder(_float(step), up + down)
        return ops.minimum(_line(self.lowest, 1.0, t / up), _line(1.0, self.lowest, (t - up) / down))


@dataclass(frozen=True)
class Trapezoid(Schedule):
    """1, then a line to `final` over the fraction `decay` of the steps, the last ones (Hu et al. 2024).

    With a warm-up, which every schedule can have, it is "warm-up, stable, decay".
    """

    total_steps: Size
    decay: Probability = 0.2
    final: NonNegative = 0.0

    def __call__(self, step: Value) -> Value:
        last = max(self.decay * self.total_steps, 1.0)
        return _line(1.0, self.final, (_float(step) - (self.total_steps - last)) / last)


@dataclass(frozen=True)
class OneCycle(Schedule):
    """A rise from 1 / div_factor to 1, then a fall to 1 / (div_factor final_div_factor) (Smith and Topin 2018).

    Both are half cosines. The rise takes the fraction `pct_start` of the steps. The steps are those of
    torch.optim.lr_scheduler.OneCycleLR: the last value is reached at step total_steps - 1, and stays. Momentum is not
    changed.
    """

    total_steps: Size
    pct_start: Fraction = 0.3
    div_factor: AtLeastOne = 25.0
    final_div_factor: AtLeastOne = 1e4

    @classmethod
    def kind(cls) -> str:
        return "one_cycle"

    def __call__(self, step: Value) -> Value:
        start, final = 1 / self.div_factor, 1 / (self.div_factor * self.final_div_factor)
        peak = self.pct_start * self.total_steps - 1  # may be negative: then the decay has begun before step 0
        t = _float(step)
        down = _anneal(1.0, final, (t - peak) / (self.total_steps - 1 - peak))
        if peak <= 0:
            return down
        return ops.where(ops.less_equal(t, peak), _anneal(start, 1.0, t / peak), down)


@dataclass(frozen=True)
class Plateau(Schedule):
    """Multiplies the rate by `factor` when the training loss stops falling, as ReduceLROnPlateau of PyTorch.

    The loss is the mean over the examples of an epoch, each with the weights of its step. It has fallen if it is below
    (1 - threshold) times the lowest one so far. After more than `patience` epochs in which it has not, the rate is
    multiplied, but not to less than `lowest` times the first one, and the count begins again.

    A call returns 1. The factor is a part of the training's state, which `init` and `updated` give.
    """

    steps_per_epoch: Size
    factor: Fraction = 0.1
    patience: Count = 10
    threshold: Fraction = 1e-4
    lowest: Probability = 0.0

    def __call__(self, step: Value) -> Value:
        return ops.ones_like(_float(step))

    def init(self) -> dict[str, Value]:
        """The state before the first step: "factor", "lowest_loss", "loss" of this epoch so far, and "waited"."""
        numbers = {"factor": np.float64(1), "lowest_loss": np.float64(HIGH), "loss": np.float64(0)}
        return {name: array(x) for name, x in {**numbers, "waited": np.int64(0)}.items()}

    def updated(self, state: Mapping[str, Value], loss: Value, step: Value) -> dict[str, Value]:
        """The state after step `step`, counted from 0, on examples whose losses add up to `loss`."""
        total = state["loss"] + _float(loss)
        ended = ops.equal(ops.remainder(step + 1, self.steps_per_epoch), 0)
        fallen = ended & ops.less(total, state["lowest_loss"] * (1 - self.threshold))
        waited = ops.where(fallen, 0, state["waited"] + ops.astype(ended, np.int64))
        due = ops.greater(waited, self.patience)
        lower = ops.maximum(state["factor"] * self.factor, self.lowest)
        return {
            "factor": ops.where(due, lower, state["factor"]),
            "lowest_loss": ops.where(fallen, total, state["lowest_loss"]),
            "loss": ops.where(ended, 0.0, total),
            "waited": ops.where(due, 0, waited),
        }


def plateau_of(schedule: Schedule) -> Plateau | None:
    """The schedule, or the one after a warm-up, if it is a Plateau."""
    found = schedule.after if isinstance(schedule, WarmUp) else schedule
    return found if isinstance(found, Plateau) else None


@dataclass(frozen=True)
class WarmUp(Schedule):
    """A linear rise over `steps` steps, followed by the schedule `after`, which begins at its own step 0.

    At step t < steps the factor is (t + 1) / (steps + 1) times the first factor of `after` (Goyal et al. 2017).
    """

    steps: Count
    after: Schedule

    def __call__(self, step: Value) -> Value:
        rise = ops.minimum((_float(step) + 1.0) / (self.steps + 1), 1.0)
        return rise * self.after(ops.maximum(step - self.steps, 0))


SCHEDULES: dict[str, type[Schedule]] = {
    schedule.kind(): schedule
    for schedule in (
        Constant, Step, MultiStep, Exponential, Cosine, CosineRestarts, Polynomial, Triangular, Trapezoid,
        OneCycle, Plateau,
    )
}  # fmt: skip
"""Schedules by their name in a config; WarmUp can precede each of them."""


def _float(step: Any) -> Value:
    return ops.astype(step, np.float64)


def _anneal(start: float, end: float, progress: Value) -> Value:
    """Half a cosine from `start` to `end` as `progress` goes from 0 to 1."""
    return end + (start - end) / 2 * (1.0 + ops.cos(pi * ops.clip(progress, 0.0, 1.0)))


def _line(start: float, end: float, progress: Value) -> Value:
    """A line from `start` to `end` as `progress` goes from 0 to 1."""
    return start + (end - start) * ops.clip(progress, 0.0, 1.0)
