"""The search for a learning rate: many rates are the members of a sweep, and are trained for some steps together.

L. Smith, "Cyclical learning rates for training neural networks", WACV 2017, raises the rate during one training. Here
each rate has a training of its own, from the same weights and on the same batches, so a loss does not depend on smaller
rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt

import numpy as np

from adtrain.config import Config
from adtrain.core.errors import AdtrainError
from adtrain.sweeps.members import Group
from adtrain.sweeps.session import Session
from adtrain.sweeps.wave import WaveTraining, run_to_end

NEARLY = 0.1
"""A rate is nearly as good as the best one if its decrease of the loss is smaller by at most this part."""


@dataclass(frozen=True)
class Tried:
    """A learning rate, and the mean training loss over the steps; None where a number was not finite."""

    rate: float
    loss: float | None


@dataclass(frozen=True)
class RateSearch:
    """What a search has found.

    Attributes:
        key: of the learning rate in the config, such as "optimizer.adam.lr".
        steps: of each training.
        tried: in the order of the rates.
    """

    key: str
    steps: int
    tried: Sequence[Tried]

    @property
    def smooth(self) -> list[float]:
        """The loss at each rate: the median of it and its two neighbours. A loss of None counts as infinite."""
        losses = [inf if x.loss is None else x.loss for x in self.tried]
        padded = [losses[0], *losses, losses[-1]]
        return [sorted(padded[i : i + 3])[1] for i in range(len(losses))]

    @property
    def best(self) -> int:
        """The index of the rate with the smallest smooth loss."""
        return int(np.argmin(self.smooth))

    @property
    def near(self) -> tuple[int, int]:
        """The first and the last index of the rates around the best one that are nearly as good."""
        smooth = self.smooth
        most = max((x for x in smooth[: self.best + 1] if isfinite(x)), default=inf)
        limit = smooth[self.best] + NEARLY * (most - smooth[self.best])
        first = last = self.best
        while first > 0 and smooth[first - 1] <= limit:
            first -= 1
        while last + 1 < len(smooth) and smooth[last + 1] <= limit:
            last += 1
        return first, last

    @property
    def proposal(self) -> float:
        """The geometric mean of the first and the last rate that are nearly as good, with two digits."""
        first, last = self.near
        return float(f"{sqrt(self.tried[first].rate * self.tried[last].rate):.1e}")

    @property
    def is_at_end(self) -> bool:
        """Whether the best rate is the smallest or the largest one, so that others may be better."""
        return self.best in (0, len(self.tried) - 1)


def rates_within(low: float, high: float, count: int) -> list[float]:
    """A geometric sequence from `low` to `high`, rounded to four digits."""
    return [float(f"{x:.3e}") for x in np.geomspace(low, high, count)]


def settings(cfg: Config, rates: Sequence[float], steps: int) -> list[str]:
    """The overrides of a config for a sweep whose members are trained with one rate each for `steps` steps.

    Raises ConfigError where the config has a section `sweep`, or an optimizer without a learning rate.
    """
    if cfg.sweep is not None:
        raise cfg.error_at(("sweep",), "found a sweep, expected none: --set sweep=null leaves it out")
    listed = ", ".join(map(str, rates))
    plain = {
        "schedule": "constant",
        "data.validation": 0,
        "data.validation_tokens": "null",
        "data.order": "null",
        "data.views": "null",
        "training.steps": steps,
        "training.epochs": steps,
        "training.best_by": "null",
        "training.final_model": "last",
        "training.early_stopping": "null",
        "training.metrics": "null",
        "training.checkpoint_every": "null",
        "training.validate_every": "null",
    }
    return [f"{key}={value}" for key, value in plain.items()] + [f"sweep={{{key_of(cfg)}: [{listed}], order: shared}}"]


def key_of(cfg: Config) -> str:
    """The key of the learning rate."""
    if "lr" not in type(cfg.optimizer).model_fields:
        raise cfg.error_at(("optimizer",), f"found {cfg.optimizer.kind}, expected an optimizer with the option lr")
    return f"optimizer.{cfg.optimizer.kind}.lr"


def search(session: Session, key: str, stop: Callable[[], bool]) -> RateSearch | None:
    """Train the members of a sweep of rates; None if `stop` returned True, which is called about ten times a second.

    Raises AdtrainError where no rate has a finite loss.
    """
    losses: dict[int, float] = {}
    plans = session.plans()
    for plan in plans:
        first = 0
        for size in plan.waves:
            found = _losses(session, plan.group, slice(first, first + size), stop)
            if found is None:
                return None
            losses |= found
            first += size
    members = sorted(session.members, key=lambda member: float(member.values[key]))
    tried = [Tried(float(x.values[key]), losses.get(x.number)) for x in members]
    if all(x.loss is None for x in tried):
        raise AdtrainError(f"{key}: found no rate from {tried[0].rate:g} on with a finite loss; lower --from")
    return RateSearch(key, plans[0].steps, tried)


def _losses(session: Session, group: Group, chosen: slice, stop: Callable[[], bool]) -> dict[int, float] | None:
    """The mean loss over all steps of those members of a wave whose numbers are finite; None if it was stopped."""
    wave = WaveTraining(group, group.members[chosen], session.device)
    experiment, totals, steps = group.experiment, dict[int, float](), 0
    for _ in range(experiment.epochs):
        taken = min(experiment.steps_per_epoch, experiment.total_steps - steps)
        scores = run_to_end(wave.epoch_in_parts(stop))
        if scores is None:
            return None
        finite = {x.member: x.train.loss for x in scores.members if x.failed_at is None and x.train is not None}
        totals = {number: totals.get(number, 0.0) + loss * taken for number, loss in finite.items()}
        steps += taken
    return {number: total / steps for number, total in totals.items()}
