"""Event files for TensorBoard, written during a run. The package tensorboard is imported only when needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from adtrain.core.errors import AdtrainError
from adtrain.files import read_regular, unwritable
from adtrain.training.progress import Epoch, Interval, Validated
from adtrain.training.step import TrainState
from adtrain.training.trainer import Observer

FOLDER = "tensorboard"
HEAD, FRAME = 12, 16
"""Bytes of a record before its event, a length of 8 bytes and a checksum, and with the checksum after it."""


def check(folder: Path) -> None:
    """Raise AdtrainError where tensorboard is missing, or the run's folder has a name that it cannot write to."""
    try:
        import tensorboard.summary  # noqa: F401
    except ImportError as error:
        raise AdtrainError("writing event files needs tensorboard; pip install 'adtrain[tensorboard]'") from error
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise AdtrainError(f"{folder}: found a name that is not UTF-8, which TensorBoard cannot write to") from None


def _truncate(path: Path, step: int) -> None:
    """End an event file before its first event of a later step, or its first incomplete one."""
    from tensorboard.compat.proto.event_pb2 import Event

    content, end = read_regular(path), 0
    while len(content) >= end + FRAME:
        begin = end + HEAD
        length = int.from_bytes(content[end : end + 8], "little")
        if len(content) < end + FRAME + length or Event.FromString(content[begin : begin + length]).step > step:
            break
        end += FRAME + length
    try:
        os.truncate(path, end)
    except OSError as error:
        raise unwritable(path, error) from error


class EventFiles(Observer):
    """Writes scalars by step: loss and metrics of training and validation, learning rate, images per second."""

    def __init__(self, folder: Path, resumed_at: int | None = None) -> None:
        """Write to a new file in `folder`, which is created if it does not exist.

        In a run that was resumed at a step, events of later steps are removed: they are written again.
        Raises AdtrainError where a file cannot be changed.
        """
        check(folder)
        from tensorboard.summary import Writer

        if resumed_at is not None:
            for path in folder.glob("events.out.tfevents.*"):
                _truncate(path, resumed_at)
        self.writer = Writer(str(folder))

    def interval_done(self, interval: Interval) -> None:
        self._scalars("train", interval.train._asdict(), interval.step)
        self.writer.add_scalar("learning_rate", interval.learning_rate, interval.step)
        self.writer.add_scalar("images_per_second", interval.images_per_second, interval.step)
        self.writer.flush()  # makes the interval visible at once

    def validated(self, validated: Validated) -> None:
        self._scalars("validation", validated.validation._asdict(), validated.step)
        self.writer.flush()

    def epoch_done(self, epoch: Epoch, state: Callable[[], TrainState]) -> None:
        if epoch.validation is not None:
            self._scalars("validation", epoch.validation._asdict() | epoch.metrics, epoch.step)
            self.writer.flush()

    def close(self) -> None:
        """Write pending events and close the file."""
        self.writer.close()

    def _scalars(self, part: str, values: Mapping[str, float], step: int) -> None:
        # The tag's prefix groups charts: one group for the loss and one for each metric, each with both splits.
        for name, value in values.items():
            self.writer.add_scalar(f"{name}/{part}", value, step)
