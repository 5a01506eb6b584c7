"""Shows the progress of a training: bars on a terminal and in a notebook, otherwise a line for each epoch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any

from adtrain.training import Epoch, Experiment, Interval, Observer, TrainState, Validated, scores
from adtrain.training.costs import step_flops
from adtrain.training.summary import speed_text

NARROW = 75
"""Columns of a terminal; below, a bar has no time left, so that it is at least ten characters long."""


class ProgressLines(Observer):
    """Passes a line to `write` after each epoch."""

    epochs = 0
    experiment: Experiment | None = None
    peak: float | None = None
    """The most FLOP a second of the device, if they are known."""

    def __init__(self, write: Callable[[str], None], examples: str = "images") -> None:
        """`examples` says what the data consist of: "images", "rows" or "sequences"."""
        self.write, self.examples = write, examples

    def training_started(self, experiment: Experiment) -> None:
        self.experiment = experiment

    @cached_property
    def step_flops(self) -> int | None:
        return None if self.experiment is None else step_flops(self.experiment)

    def speed(self, images_per_second: float) -> str:
        """Examples a second, for a text characters, bytes or tokens; and the share of the device's peak, if known."""
        if self.experiment is None:
            return f"{images_per_second:,.0f} {self.examples}/s"
        data = self.experiment.config.data
        found = speed_text(data, images_per_second)
        if self.peak is None or self.step_flops is None:
            return found
        return f"{found}, {self.step_flops * images_per_second / self.experiment.full_batch / self.peak:.0%} of peak"

    def left(self, step: int, images_per_second: float) -> str:
        """The time until the last step, and from a minute on when that is: ", about 90 s left, until 14:32"."""
        if self.experiment is None or not images_per_second:
            return ""
        seconds = (self.experiment.total_steps - step) * self.experiment.full_batch / images_per_second
        if seconds < 0.5:
            return ""
        end = datetime.now() + timedelta(seconds=seconds)
        return f", about {seconds:,.0f} s left" + (f", until {end:%H:%M}" if seconds >= 60 else "")

    def epoch_started(self, epoch: int, epochs: int, images: int) -> None:
        self.epochs = epochs

    def validated(self, validated: Validated) -> None:
        self.write(f"step {validated.step:,}: validation {scores.text(validated.validation)}")

    def epoch_done(self, epoch: Epoch, state: Callable[[], TrainState]) -> None:
        text = scores.text(epoch.train)
        if epoch.validation is not None:
            text += f", validation {scores.text(epoch.validation)}"
        text += "".join(f", {name} {scores.value_text(name, x)}" for name, x in epoch.metrics.items())
        speed = f"{self.speed(epoch.images_per_second)}, {epoch.seconds:.1f} s"
        left = self.left(epoch.step, epoch.images_per_second)
        self.write(f"epoch {epoch.epoch}/{self.epochs}: {text}, {speed}{left}")

    def show_status(self, status: str) -> None:
        """Show what the process does besides steps, such as "compiling 7 of 12 kernels". See `core.timeline`."""

    def close(self) -> None:
        """Remove the bar, if there is one, so that other output can follow."""


class IntervalLines(ProgressLines):
    """Passes a line to `write` after each interval of steps, and after each epoch."""

    def interval_done(self, interval: Interval) -> None:
        speed, left = self.speed(interval.images_per_second), self.left(interval.step, interval.images_per_second)
        rate = f"learning rate {interval.learning_rate:.4g}"
        self.write(f"step {interval.step:,}: {scores.text(interval.train)}, {rate}, {speed}{left}")


class ProgressBars(ProgressLines):
    """Shows a bar during an epoch, and replaces it by a line."""

    bar: Any = None

    def __init__(self, write: Callable[[str], None], tqdm: Callable[..., Any], examples: str = "images") -> None:
        """`tqdm` makes a bar: the class of that name, or its subclass for notebooks."""
        super().__init__(write, examples)
        self.tqdm = tqdm

    def show_status(self, status: str) -> None:
        if self.bar is None:
            self.bar = self._bar("end" if self.epochs else "start", 1, "")
        if not status and not self.bar.n:
            self.bar.reset()  # so that the speed leaves out the time before the steps
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
            shown = [scores.short_text(interval.train)]
            if self.experiment is not None and self.experiment.config.data.is_text:  # for which epochs are long
                shown.append(self.speed(interval.images_per_second))
                shown.append(self.left(interval.step, interval.images_per_second).removeprefix(", about "))
            self.bar.set_postfix_str(", ".join(filter(None, shown)), refresh=False)

    def epoch_done(self, epoch: Epoch, state: Callable[[], TrainState]) -> None:
        self.close()
        super().epoch_done(epoch, state)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def progress_display(write: Callable[[str], None], examples: str = "images") -> ProgressLines:
    """Bars in a notebook or if stderr is a terminal, otherwise lines. `write` prints the line of an epoch.

    A notebook shows stderr in red. So there bars are widgets or, without ipywidgets, text on stdout.
    """
    if in_notebook():
        if find_spec("ipywidgets") is not None:
            from tqdm.notebook import tqdm as notebook_tqdm

            return ProgressBars(write, notebook_tqdm, examples)
        from tqdm import tqdm

        return ProgressBars(write, partial(tqdm, file=sys.stdout), examples)
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
