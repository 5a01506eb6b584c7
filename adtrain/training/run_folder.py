"""A run's folder: its config, metrics and model, the checkpoints to go on from, and a summary once the run is over."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from adtrain.core.errors import AdtrainError
from adtrain.files import remove_temporaries, unwritable, write_atomic
from adtrain.training import model_file
from adtrain.training.checkpoint import Checkpoint, Progress, encode
from adtrain.training.endings import Result
from adtrain.training.experiment import Experiment
from adtrain.training.progress import Epoch, Interval, Observer
from adtrain.training.step import TrainState
from adtrain.training.trainer import Start
from adtrain.training.warm_start import MODEL

CONFIG, METRICS, SUMMARY = "config.yaml", "metrics.jsonl", "summary.json"
LAST, BEST = "last.safetensors", "best.safetensors"
ALL = (CONFIG, METRICS, MODEL, LAST, BEST, SUMMARY)
DEFAULT_PARENT = Path("runs")


class RunFolder:
    """One run's files: the model after each epoch, a checkpoint at least as often, a summary at last; each whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, experiment: Experiment, path: Path | None = None, name: str | None = None) -> RunFolder:
        """A folder that holds the resolved config and no metrics yet: `path`, or runs/NAME, runs/NAME-2, and so on.

        NAME is `name`, or else that of the config.
        Raises AdtrainError where it cannot be written, `path` holds a run already, or `training.init_from` has no
        weights for the experiment.
        """
        if experiment.config.training.init_from is not None:
            experiment.initial_state("cpu")
        folder = cls(_unused(name or experiment.config.name) if path is None else _empty(path))
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

    def reopen(self, experiment: Experiment, start: Start) -> None:
        """Make the folder that of a run which goes on from `start`; what was written after it becomes void.

        Raises AdtrainError where it cannot be written.
        """
        for name in ALL:
            remove_temporaries(self.path / name)
        metrics, progress = self.path / METRICS, start.checkpoint.progress
        try:
            if metrics.exists():
                content = metrics.read_bytes()
                os.truncate(metrics, content.rfind(b"\n") + 1)  # a line that was being written when the run was killed
            (self.path / SUMMARY).unlink(missing_ok=True)
        except OSError as error:
            raise unwritable(metrics, error) from error
        self.append_metrics("resumed", {"epoch": progress.epoch, "step": progress.step})
        self.write_checkpoint(LAST, encode(experiment, start.checkpoint))
        if start.best is start.checkpoint:  # the process may have been killed between writing the one and the other
            self.write_checkpoint(BEST, encode(experiment, start.checkpoint))
        write_atomic(self.path / CONFIG, experiment.config_text.encode())

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep other processes from training into this folder during a block, however it ends.

        Raises AdtrainError where one is at it. A system without fcntl has nothing to keep them away by.
        """
        try:
            import fcntl
        except ImportError:
            yield
            return
        path = self.path / METRICS
        try:
            file = path.open("ab")
        except OSError as error:
            raise unwritable(path, error) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AdtrainError(f"{self.path}: another process is training into this folder; wait for it") from None
            yield

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

    def write_checkpoint(self, name: str, content: bytes) -> None:
        """Write last.safetensors or best.safetensors, the metrics so far being on the disk before it is."""
        metrics = self.path / METRICS
        try:
            with metrics.open("ab") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise unwritable(metrics, error) from error
        write_atomic(self.path / name, content)

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

    def checkpoint(self, checkpoint: Checkpoint, best: bool) -> None:
        content = encode(self.experiment, checkpoint)
        self.folder.write_checkpoint(LAST, content)
        if best:
            self.folder.write_checkpoint(BEST, content)

    def stopped(self, reason: str, progress: Progress) -> None:
        self.folder.append_metrics("stopped", {"reason": reason, "epoch": progress.epoch, "step": progress.step})

    def finished(self, result: Result) -> None:
        self.folder.write_model(self.experiment, result.state)
        at = {"epoch": result.epochs, "step": result.steps}
        self.folder.append_metrics("test", {**at, "test": result.test._asdict()})


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, without those that a resumption has made void and one that is unfinished.

    When a run goes on from step S of epoch E, what it had written beyond that step, or on that epoch as a whole, is
    void. Raises AdtrainError where the file is missing or holds anything else.
    """
    path = run / METRICS
    try:
        *lines, _unfinished = path.read_bytes().split(b"\n")
    except OSError as error:
        raise AdtrainError(f"{path}: cannot be read ({error.strerror})") from None
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            kind, epoch, step = record["kind"], int(record["epoch"]), int(record["step"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise AdtrainError(f"{path}:{number}: found no metrics, expected a line of adtrain train") from None
        if kind == "resumed":
            found = [x for x in found if x["step"] <= step and not (x["kind"] == "epoch" and x["epoch"] >= epoch)]
        found.append(record)
    return found


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
