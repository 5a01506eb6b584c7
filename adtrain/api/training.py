"""Trains a network from Python, by the same functions as the command line.

Also what a training returns, and the metrics of its epochs for callbacks of the user, which may end the training.
"""

from __future__ import annotations

import io
import os
import sys
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from adtrain import config as configs
from adtrain import nn, training
from adtrain.api.model import Model, as_path, check_type
from adtrain.config import Config
from adtrain.config.records import plain
from adtrain.config.source import Node, of_python
from adtrain.core import timeline
from adtrain.core.array import type_with_article
from adtrain.core.backend import usable_device
from adtrain.core.errors import AdtrainError
from adtrain.core.timeline import during, status_handler
from adtrain.data.part import as_numpy
from adtrain.data.table_encoder import csv_in_memory, is_rows
from adtrain.display import in_notebook, progress_display
from adtrain.report.record import SCORES, Curve, Panel
from adtrain.signals import deferred_interrupt
from adtrain.templates import macro
from adtrain.text import visible
from adtrain.training import (
    Arrays,
    Epoch,
    Experiment,
    Interval,
    Observer,
    RunFolder,
    Score,
    Summary,
    TrainedModel,
    TrainState,
)
from adtrain.training.run_folder import ARRAYS, ROWS
from adtrain.training.scores import value_text

Metrics: TypeAlias = dict[str, float]
"""The metrics of an epoch: epoch, step, train_loss and train_accuracy (or train_rmse and others, as `Score` has them),
learning_rate (of the last step), seconds, and images_per_second. If there are validation images, also validation_loss,
validation_accuracy and the metrics of `training.metrics`, with validation_ before their names."""

SPLITS = ("train", "validation")


class Callback(Protocol):
    """An object that is called after each epoch."""

    def on_epoch(self, metrics: Metrics) -> bool | None:
        """Called with the metrics of an epoch. Returns True to end the training, otherwise False or None."""
        ...


class EpochMetrics(Observer):
    """Collects the metrics of all epochs in `rows`, and passes those of each epoch to the callbacks."""

    def __init__(self, callbacks: Sequence[Callback | Callable[[Metrics], bool | None]]) -> None:
        self.callbacks = [_function(callback) for callback in callbacks]
        self.rows: list[Metrics] = []
        self.learning_rate = float("nan")

    def interval_done(self, interval: Interval) -> None:
        self.learning_rate = interval.learning_rate

    def epoch_done(self, epoch: Epoch, state: Callable[[], TrainState]) -> bool:
        row: Metrics = {"epoch": epoch.epoch, "step": epoch.step}
        for split in SPLITS:
            score = plain(getattr(epoch, split)) or {}
            row |= {f"{split}_{name}": value for name, value in score.items()}
        row |= {f"validation_{name}": value for name, value in epoch.metrics.items()}
        row |= {"learning_rate": self.learning_rate, "seconds": epoch.seconds}
        row["images_per_second"] = epoch.images_per_second
        self.rows.append(row)
        answers = [_answer(callback(dict(row))) for callback in self.callbacks]
        return any(answers)


def _function(callback: Any) -> Callable[[Metrics], Any]:
    found = getattr(callback, "on_epoch", callback)
    if not callable(found):
        kind = type(callback).__name__
        raise AdtrainError(f"train: found a callback of type {kind}, expected a function, or an object with on_epoch")
    function: Callable[[Metrics], Any] = found
    return function


def _answer(value: Any) -> bool:
    if value is None or isinstance(value, (bool, np.bool_)):
        return bool(value)
    found = type_with_article(value)
    raise AdtrainError(f"train: a callback returned {found}, expected True to end the training, or None")


SHOWN_EPOCHS = 20
COLOURS = {"train": "blue", "validation": "orange"}


class History(dict[str, np.ndarray]):
    """A NumPy array (epochs,) for each metric; `Metrics` lists the names."""

    @classmethod
    def of(cls, rows: Sequence[Metrics]) -> History:
        """The history of epochs with these metrics, first to last."""
        return cls({name: np.array([row[name] for row in rows]) for name in rows[0]} if rows else {})

    def to_pandas(self) -> Any:
        """The history as a DataFrame, a row for each epoch. Raises AdtrainError where pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise AdtrainError("to_pandas needs pandas; pip install 'adtrain[pandas]'") from None
        return pandas.DataFrame(dict(self))


@dataclass(frozen=True, eq=False, repr=False)
class TrainingResult:
    """The result of a training. In a notebook it shows itself as two tables and the curves of loss and metrics.

    Attributes:
        history: the metrics by epoch.
        model: the trained model: the best epoch's with validation images or `training.early_stopping`, otherwise the
            last epoch's, unless `training.final_model` says otherwise; `summary.model_epoch` is its epoch.
        summary: settings, scores and times.
        path: the run's folder, if the training had one.
    """

    history: History
    model: Model
    summary: Summary
    path: Path | None

    @property
    def params(self) -> nn.Params:
        """The model's parameters, a tree of arrays."""
        return self.model.params

    @property
    def test(self) -> Score:
        """The score of the model on the test images."""
        return self.summary.test

    def __repr__(self) -> str:
        return visible(f"TrainingResult({', '.join(f'{name} {value}' for name, value in self._facts().items())})")

    def _repr_html_(self) -> str:
        columns, count = dict.fromkeys(self.history, "number"), len(self.history["epoch"])
        rows = zip(*(map(_number, values[-SHOWN_EPOCHS:]) for values in self.history.values()), strict=True)
        note = f"the last {SHOWN_EPOCHS} of {count} epochs" if count > SHOWN_EPOCHS else ""
        return macro("parts.html.j2", "result")(self._facts(), self._pictures(), note, columns, rows)

    def _pictures(self) -> list[tuple[str, str]]:
        """Caption and address of the picture of each score that the history has by epoch."""
        epochs, pictures = self.history["epoch"].tolist(), []
        for name, test in self.test._asdict().items():
            given = {split: self.history.get(f"{split}_{name}") for split in SCORES}
            curves = [Curve(split, split, epochs, ys.tolist()) for split, ys in given.items() if ys is not None]
            if epochs and all(np.isfinite([*curve.ys, test]).all() for curve in curves):
                colours = ", ".join(f"{curve.name} {COLOURS[curve.name]}" for curve in curves)
                picture = Panel(name, "epoch", curves, partial(value_text, name), test).picture()
                address = f"data:image/svg+xml;base64,{b64encode(picture.encode()).decode()}"
                pictures.append((f"{name}: {colours}, test dashed", address))
        return pictures

    def _facts(self) -> dict[str, str]:
        summary = self.summary
        found = {
            "config": self.model.config.name,
            "test": ", ".join(f"{name} {_number(value)}" for name, value in summary.test._asdict().items()),
            "epochs": str(summary.epochs) + ("" if summary.ended == "finished" else f" ({summary.ended})"),
            "parameters": f"{summary.parameters:,}",
            "seconds": f"{summary.train_seconds:.2f}",
            "device": summary.device_name,
        }
        return found | ({} if self.path is None else {"folder": str(self.path)})


def _number(value: float) -> str:
    return f"{value:,}" if float(value).is_integer() else f"{value:.4g}"


HELD_OUT = 0.2
"""The fraction of the arrays that is held out as the test part if neither it nor `data.test` is given."""

SOURCES = ("data.dataset", "data.path", "data.test_path")


def train(
    config: str | os.PathLike[str] | Config | Mapping[str, Any],
    data: Any = None,
    *,
    test_data: tuple[Any, Any] | None = None,
    callbacks: Sequence[Callback | Callable[[Metrics], bool | None]] = (),
    output_dir: str | os.PathLike[str] | None = None,
    device: str = "auto",
    epochs: int | None = None,
    seed: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> TrainingResult:
    """Train the network of a config, and return its history and the model.

    Args:
        config: a YAML file, the name of a packaged config such as "mlp", a Config, or a dict with the same structure.
        data: images and labels in place of the config's data. Images are (N, H, W), (N, H, W, C), (N, C, H, W), or
            rows (N, F); labels are N integers or strings, or numbers to predict, floats (N,) or numbers (N, targets).
            They must not be changed during the training. Or a table with the columns that the config names, by their
            names: a DataFrame, a dict of lists, or a list of dicts.
        test_data: images and labels of the test part. Without them the fraction `data.test` of `data` is held out, or
            0.2 if the config does not set it.
        callbacks: functions of the metrics of an epoch, or objects with `on_epoch`. One that returns True ends the
            training.
        output_dir: a new folder for the files of a run: config, metrics, model, checkpoints, summary, and `data`. By
            default nothing is written.
        device: "cpu", "gpu", or "auto" for the GPU if there is one.
        epochs: overrides `training.epochs`.
        seed: overrides `training.seed`.
        overrides: values by their dotted keys, such as {"optimizer.adam.lr": 0.01}.
        progress: show a bar, and a line for each epoch, on stderr; in a notebook on stdout, which it does not colour.

    Raises:
        AdtrainError: the config, the data or another argument is wrong; the message is one line for each problem.
        KeyboardInterrupt: Ctrl-C. With `output_dir` the folder has a checkpoint, and `adtrain train --resume` continues
            the run. A second Ctrl-C ends the training at once, with the last checkpoint that was written.
    """
    timeline.restart()
    device = usable_device(device)
    check_type(callbacks, (list, tuple), "train: callbacks", "a list")
    check_type(overrides, (Mapping, type(None)), "train: overrides", "a dict")
    observer = EpochMetrics(callbacks)
    path = None if output_dir is None else as_path(output_dir, "train: output_dir")
    changes = dict(overrides or {})
    for key, name, value in (("training.epochs", "epochs", epochs), ("training.seed", "seed", seed)):
        if value is not None:
            changes[key] = of_python(value, name, tuple(key.split(".")))
    arrays = None
    if data is not None:
        arrays = Arrays(data, test_data)
        if is_rows(data) and test_data is not None:
            raise AdtrainError("train: found test_data with a table, expected none: data.test holds out rows of it")
        changes |= _array_settings(changes, path, ROWS if is_rows(data) else ARRAYS)
    elif test_data is not None:
        raise AdtrainError("train: found test_data without data, expected both or neither")
    cfg = _config(config, changes)
    if arrays is not None and test_data is None and not cfg.data.options.test:
        cfg = _config(config, {**changes, "data.test": Node("data", HELD_OUT)})
    training.check_precision(cfg, device)
    with during("data"):
        experiment = training.prepare(cfg, arrays=arrays, device=device)
    if progress and experiment.batch_note is not None:
        _write_line(experiment.batch_note)
    folder = None
    if path is not None:
        folder = RunFolder.create(experiment, path, {} if arrays is None else _file(arrays, cfg))
    with nullcontext() if folder is None else folder.in_training(experiment.config):
        result = _run(experiment, folder, device, observer, progress)
        summary = training.summarize(experiment, result, device)
        if folder is not None:
            folder.write_summary(summary)
    model = Model(TrainedModel.of(experiment, result.state), device)
    return TrainingResult(History.of(observer.rows), model, summary, path)


def _run(
    experiment: Experiment, folder: RunFolder | None, device: str, observer: Observer, progress: bool
) -> training.Result:
    """Train, and write the files of the run into the folder, if there is one."""
    with ExitStack() as stack:
        shown = progress_display(_write_line, experiment.config.data.examples)
        display = [stack.enter_context(closing(shown))] if progress else []
        if progress:
            stack.enter_context(status_handler(shown.show_status))
        observers = [*display, observer]
        stop = stack.enter_context(deferred_interrupt())
        advice = ""
        try:
            if folder is None:
                result = training.run(experiment, device, observers, stop=stop)
            else:
                advice = f"; {folder.advice(experiment.config)}"
                result = training.run_in_folder(folder, experiment, device, observers, stop=stop)
        except training.Interrupted as stopped:
            raise KeyboardInterrupt(f"{stopped}{advice}") from None
        if stop():  # after the last test batch: too late for Interrupted
            raise KeyboardInterrupt(f"stopped before the summary{advice}")
        return result


def _config(given: Any, changes: Mapping[str, Any]) -> Config:
    if isinstance(given, Config):
        return configs.from_values(given.model_dump(mode="json", exclude_none=True), changes) if changes else given
    if isinstance(given, Mapping):
        return configs.from_values(given, changes)
    check_type(given, (str, os.PathLike), "train: config", "a path or name, a Config or a dict")
    return configs.load(given, changes)


def _array_settings(changes: Mapping[str, Any], folder: Path | None, file: str) -> dict[str, Any]:
    """The settings of data in memory. In a run's folder they are a file, so that the run can be continued."""
    for key in SOURCES:
        if key in changes:
            raise AdtrainError(f"train: found data and the override {key}, expected one of them")
    name = "data" if file == ARRAYS else file  # of a table the suffix tells which keys there are
    place = name if folder is None else os.path.join(os.path.abspath(folder), file)
    return dict(zip(SOURCES, (Node("data", x) for x in (None, place, None)), strict=True))


def _file(arrays: Arrays, cfg: Config) -> dict[str, bytes]:
    """The name and the content of the file with the data, which `prepare` reads as the same data."""
    if is_rows(arrays.data):
        return {ROWS: csv_in_memory(arrays.data, cfg.data.options)}
    content, named = io.BytesIO(), dict[str, Any]()
    pairs = {"train": arrays.data, "test": arrays.test_data}
    for part, pair in pairs.items():
        if pair is not None:
            named |= {f"x_{part}": as_numpy(pair[0], part), f"y_{part}": as_numpy(pair[1], part)}
    np.savez(content, **named)
    return {ARRAYS: content.getvalue()}


def _write_line(text: str) -> None:
    print(visible(text), file=sys.stdout if in_notebook() else sys.stderr, flush=True)
