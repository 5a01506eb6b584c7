"""What a training returns, and the metrics of its epochs for callbacks of the user, which may end the training."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from adtrain import nn
from adtrain.api.model import Model
from adtrain.config.records import plain
from adtrain.core.array import type_with_article
from adtrain.core.errors import AdtrainError
from adtrain.report.record import SCORES, Curve, Panel
from adtrain.templates import macro
from adtrain.text import visible
from adtrain.training import Epoch, Interval, Observer, Score, Summary, TrainState
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
