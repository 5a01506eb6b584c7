"""Learning-rate schedules: the factor on the base rate at each step; step 0 is the first update.

A factor is a float64 0-d Value, computed by public ops from an int64 0-d Value, so it is traced with the training step.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from math import pi
from typing import Any

import numpy as np

from adtrain import ops
from adtrain.core.array import Value
from adtrain.core.checked_arguments import CheckedArguments
from adtrain.option_types import AtLeastOne, Count, Fraction, NonNegative, Size, StepList, Steps


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
    schedule.kind(): schedule for schedule in (Constant, Step, MultiStep, Exponential, Cosine, OneCycle)
}
"""Schedules by their name in a config; WarmUp can precede each of them."""


def _float(step: Any) -> Value:
    return ops.astype(step, np.float64)


def _anneal(start: float, end: float, progress: Value) -> Value:
    """Half a cosine from `start` to `end` as `progress` goes from 0 to 1."""
    return end + (start - end) / 2 * (1.0 + ops.cos(pi * ops.clip(progress, 0.0, 1.0)))
