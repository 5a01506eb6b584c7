"""Shows the progress of a training on stderr: bars on a terminal, otherwise a line for each epoch."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from adtrain.cli.output import progress
from adtrain.config import Config
from adtrain.core.precision import PRECISIONS
from adtrain.training import Epoch, Interval, Observer, TrainState, scores


class ProgressLines(Observer):
    """Prints a line after each epoch."""

    epochs = 0

    def epoch_started(self, epoch: int, epochs: int, images: int) -> None:
        self.epochs = epochs

    def epoch_done(self, epoch: Epoch, state: TrainState) -> None:
        text = scores.text(epoch.train)
        if epoch.validation is not None:
            text += f", validation {scores.text(epoch.validation)}"
        speed = f"{epoch.images_per_second:,.0f} images/s, {epoch.seconds:.1f} s"
        text = f"epoch {epoch.epoch}/{self.epochs}: {text}, {speed}"
        if left := self.epochs - epoch.epoch:
            text += f", about {left * epoch.seconds:.0f} s left"
        progress(text)

    def close(self) -> None:
        """Remove the bar, if there is one, so that other output can follow."""


class ProgressBars(ProgressLines):
    """Shows a bar during an epoch, and replaces it by a line."""

    bar: tqdm[Any] | None = None

    def epoch_started(self, epoch: int, epochs: int, images: int) -> None:
        super().epoch_started(epoch, epochs, images)
        self.bar = tqdm(
            total=images,
            desc=f"epoch {epoch}/{epochs}",
            unit=" img",
            unit_scale=True,
            dynamic_ncols=True,
            leave=False,
            # Fits into 60 columns, so that a narrow terminal shows loss, metric and time left.
            bar_format="{desc}|{bar}| {rate_fmt}, {remaining} left{postfix}",
        )

    def step_done(self, images: int) -> None:
        if self.bar is not None:
            self.bar.update(images)

    def interval_done(self, interval: Interval) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(scores.short_text(interval.train), refresh=False)

    def epoch_done(self, epoch: Epoch, state: TrainState) -> None:
        self.close()
        super().epoch_done(epoch, state)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def progress_display() -> ProgressLines:
    """Bars if stderr is a terminal, otherwise lines."""
    return ProgressBars() if sys.stderr.isatty() else ProgressLines()


def note_precision(cfg: Config, device: str) -> None:
    """Print a note if the evaluation has another precision than the training; see `model_file.load`."""
    if device == "cpu" and cfg.training.precision in PRECISIONS:
        progress(f"trained in {cfg.training.precision}, evaluated in float32: the cpu has no {cfg.training.precision}")
