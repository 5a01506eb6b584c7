"""Reads the results of a run from its folder, also of an unfinished run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adtrain.config import Config
from adtrain.config.plugged import NONE, Trust
from adtrain.training import model_file
from adtrain.training.progress import Epoch, Interval, Line, Stopped, Validated, read_metrics
from adtrain.training.summary import Summary, read_summary

FEW_EPOCHS = 4
"""Below this number of epochs a training curve has a point for each interval of steps instead of each epoch."""


@dataclass(frozen=True)
class Record:
    """A run: its config, its metrics, and its summary, None if the run is not finished."""

    path: Path
    config: Config
    metrics: list[Line]
    summary: Summary | None

    @property
    def intervals(self) -> list[Interval]:
        return [line for line in self.metrics if isinstance(line, Interval)]

    @property
    def epochs(self) -> list[Epoch]:
        """The complete epochs."""
        return [line for line in self.metrics if isinstance(line, Epoch)]

    @property
    def validations(self) -> list[Epoch | Validated]:
        """The complete epochs and the evaluations within epochs, by step."""
        found = [line for line in self.metrics if isinstance(line, (Epoch, Validated))]
        return sorted(found, key=lambda line: line.step)

    @property
    def scored(self) -> list[Epoch | Interval]:
        """The complete epochs, then the intervals."""
        return [*self.epochs, *self.intervals]

    @property
    def steps_per_epoch(self) -> float:
        """1 if no epoch is complete."""
        return self.epochs[0].step / self.epochs[0].epoch if self.epochs else 1.0

    @property
    def by_interval(self) -> bool:
        """Whether there are too few epochs to draw the training curve by epoch."""
        return len(self.epochs) < FEW_EPOCHS and bool(self.intervals)

    @property
    def stopped(self) -> Stopped | None:
        """The last line of the metrics if it says that the run was stopped, else None."""
        last = self.metrics[-1] if self.metrics else None
        return last if isinstance(last, Stopped) else None

    @property
    def steps(self) -> int:
        """The highest step in the metrics."""
        return max((line.step for line in self.metrics), default=0)


def read(run: Path, trust: Trust = NONE) -> Record:
    """The record of the run in a folder.

    Raises:
        ConfigError: its config.yaml is wrong.
        AdtrainError: the folder holds no run, its metrics cannot be read, or its summary is damaged.
    """
    return Record(run, model_file.config_of(run, trust), read_metrics(run), read_summary(run))
