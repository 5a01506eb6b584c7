"""A run's folder: config.yaml, metrics.jsonl, model.safetensors, and summary.json once the run is over."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from adtrain.core.errors import AdtrainError
from adtrain.files import unwritable, write_atomic
from adtrain.training import model_file
from adtrain.training.experiment import Experiment
from adtrain.training.loop import Result
from adtrain.training.progress import Epoch, Interval, Observer
from adtrain.training.step import TrainState

CONFIG, METRICS, MODEL, SUMMARY = "config.yaml", "metrics.jsonl", "model.safetensors", "summary.json"
ALL = (CONFIG, METRICS, MODEL, SUMMARY)
DEFAULT_PARENT = Path("runs")


class RunFolder:
    """One run's files. The model is there after each epoch, the summary at the end; each is written as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, experiment: Experiment, path: Path | None = None) -> RunFolder:
        """A folder that holds the resolved config and no metrics yet: `path`, or runs/NAME, runs/NAME-2, and so on.

        Raises AdtrainError where it cannot be written, or `path` holds a run already.
        """
        folder = cls(_unused(experiment.config.name) if path is None else _empty(path))
        metrics = folder.path / METRICS
        try:
            metrics.open("x").close()  # of two runs that begin in one folder, one gets it
        except OSError as error:
            raise unwritable(metrics, error) from error
        try:
            write_atomic(folder.path / CONFIG, experiment.config_text.encode())
        except AdtrainError:
            folder._discard()
            raise
        return folder

    def append_metrics(self, kind: str, values: dict[str, Any]) -> None:
        """Add a line to the metrics, the whole of it or, on a full disk, nothing."""
        path = self.path / METRICS
        line = json.dumps({"kind": kind, **values}, allow_nan=False) + "\n"
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            with suppress(OSError):
                os.truncate(path, size)
            raise unwritable(path, error) from error

    def write_model(self, experiment: Experiment, state: TrainState) -> None:
        write_atomic(self.path / MODEL, model_file.encode(experiment, state))

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_atomic(self.path / SUMMARY, json.dumps(summary, indent=2, allow_nan=False).encode() + b"\n")

    def files(self) -> list[str]:
        """The names of the run's files that are there."""
        return [name for name in ALL if (self.path / name).exists()]

    def _discard(self) -> None:
        """Remove a run that has not begun; the folder stays where it holds anything else."""
        with suppress(OSError):
            for name in self.files():
                (self.path / name).unlink()
            self.path.rmdir()


class Recorder(Observer):
    """Writes down what the loop tells: metrics a line at a time, the model after each epoch."""

    def __init__(self, folder: RunFolder, experiment: Experiment) -> None:
        self.folder = folder
        self.experiment = experiment

    def interval_done(self, interval: Interval) -> None:
        self.folder.append_metrics("interval", {**interval._asdict(), "train": interval.train._asdict()})

    def epoch_done(self, epoch: Epoch, state: TrainState) -> None:
        scores = {"train": epoch.train._asdict(), "validation": epoch.validation and epoch.validation._asdict()}
        self.folder.append_metrics("epoch", {**epoch._asdict(), **scores})
        self.folder.write_model(self.experiment, state)

    def finished(self, result: Result) -> None:
        at = {"epoch": result.epochs, "step": result.steps}
        self.folder.append_metrics("test", {**at, "test": result.test._asdict()})


def _empty(path: Path) -> Path:
    """The folder at `path`, made where it is absent; other files in it are left alone."""
    there = RunFolder(path).files()
    if there:
        raise AdtrainError(
            f"{path}: holds a run already ({', '.join(there)}); give another --output-dir, or remove that run first"
        )
    if path.exists() and not path.is_dir():
        raise AdtrainError(f"{path}: found a file, expected a folder or nothing")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def _unused(name: str) -> Path:
    """A new folder; making it is what claims the name, so that two runs started together get one each."""
    path, number = DEFAULT_PARENT / name, 1
    while True:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
            path = DEFAULT_PARENT / f"{name}-{number}"
        except OSError as error:
            raise unwritable(path, error) from error
        else:
            return path
