"""Shows the progress of a training: bars on a terminal and in a notebook, otherwise a line for each epoch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from adtrain.training import Epoch, Interval, Observer, TrainState, Validated, scores

NARROW = 75
"""Columns of a terminal; below, a bar has no time left, so that it is at least ten characters long."""


class ProgressLines(Observer):
    """Passes a line to `write` after each epoch."""

    epochs = 0

    def __init__(self, write: Callable[[str], None], examples: str = "images") -> None:
        """`examples` says what the data consist of: "images", "rows" or "sequences"."""
        self.write, self.examples = write, examples

    def epoch_started(self, epoch: int, epochs: int, images: int) -> None:
        self.epochs = epochs

    def validated(self, validated: Validated) -> None:
        self.write(f"step {validated.step:,}: validation {scores.text(validated.validation)}")

    def epoch_done(self, epoch: Epoch, state: Callable[[], TrainState]) -> None:
        text = scores.text(epoch.train)
        if epoch.validation is not None:
            text += f", validation {scores.text(epoch.validation)}"
        text += "".join(f", {name} {scores.value_text(name, x)}" for name, x in epoch.metrics.items())
        speed = f"{epoch.images_per_second:,.0f} {self.examples}/s, {epoch.seconds:.1f} s"
        text = f"epoch {epoch.epoch}/{self.epochs}: {text}, {speed}"
        if (left := (self.epochs - epoch.epoch) * epoch.seconds) >= 0.5:
            text += f", about {left:.0f} s left"
        self.write(text)

    def show_status(self, status: str) -> None:
        """Show what the process does before its next step: "compiling 7 of 12 kernels". See `core.status`."""

    def close(self) -> None:
        """Remove the bar, if there is one, so that other output can follow."""


class IntervalLines(ProgressLines):
    """Passes a line to `write` after each interval of steps, and after each epoch."""

    def interval_done(self, interval: Interval) -> None:
        speed = f"{interval.images_per_second:,.0f} {self.examples}/s"
        rate = f"learning rate {interval.learning_rate:.4g}"
        self.write(f"step {interval.step:,}: {scores.text(interval.train)}, {rate}, {speed}")


class ProgressBars(ProgressLines):
    """Shows a bar during an epoch, and replaces it by a line."""

    bar: Any = None

    def __init__(self, write: Callable[[str], None], tqdm: Callable[..., Any], examples: str = "images") -> None:
        """`tqdm` makes a bar: the class of that name, or its subclass for notebooks."""
        super().__init__(write, examples)
        self.tqdm = tqdm

    def show_status(self, status: str) -> None:
        if self.bar is None and not self.epochs:
            self.bar = self._bar("epoch 1", 1, "")
        if self.bar is not None:
            self.bar.set_postfix_str(status, refresh=True)

    def epoch_started(self, epoch: int, epochs: int, images: int) -> None:
        super().epoch_started(epoch, epochs, images)
        self.close()
        self.bar = self._bar(
            f"epoch {epoch}/{epochs}", images, " {rate_fmt}" + ("" if _narrow() else ", {remaining} left")
        )

    def _bar(self, name: str, images: int, speed: str) -> Any:
        return self.tqdm(
            total=images,
            desc=name,
            unit={"images": " img", "sequences": " seq"}.get(self.examples, f" {self.examples}"),
            unit_scale=True,
            dynamic_ncols=True,
            leave=False,
            bar_format=f"{{desc}}|{{bar}}|{speed}{{postfix}}",
        )

    def step_done(self, images: int) -> None:
        if self.bar is not None:
            self.bar.update(images)

    def interval_done(self, interval: Interval) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(scores.short_text(interval.train), refresh=False)

    def epoch_done(self, epoch: Epoch, state: Callable[[], TrainState]) -> None:
        self.close()
        super().epoch_done(epoch, state)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def progress_display(write: Callable[[str], None], examples: str = "images") -> ProgressLines:
    """Bars in a notebook or if stderr is a terminal, otherwise lines. `write` prints the line of an epoch."""
    if in_notebook():
        from tqdm.auto import tqdm as notebook_tqdm

        return ProgressBars(write, notebook_tqdm, examples)
    if sys.stderr.isatty():
        from tqdm import tqdm

        return ProgressBars(write, tqdm, examples)
    return ProgressLines(write, examples)


def _narrow() -> bool:
    """Whether stderr is a terminal without room for a bar, the speed, the time left, loss and metric."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns < NARROW
    except (OSError, ValueError, AttributeError):
        return False


def in_notebook() -> bool:
    """Whether the code runs in a Jupyter kernel. IPython is not imported if it is not in use."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config
