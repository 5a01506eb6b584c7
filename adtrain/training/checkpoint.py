"""Checkpoints: all that a run needs to go on as if it had never been stopped.

Random numbers are functions of the config's seed and of the step (or the epoch, for the order of the images), so the
two counters are the whole state of all randomness. Nothing in a checkpoint depends on the time or on how often a run
was stopped: the same step of the same config gives the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from adtrain import config
from adtrain.config import Config
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.core.errors import AdtrainError
from adtrain.training import model_file, tensor_file
from adtrain.training.best import Best
from adtrain.training.evaluation import Score
from adtrain.training.experiment import Experiment
from adtrain.training.step import TrainState

FORMAT = 1
KIND = "checkpoint"
DATA_NUMBERS = ("classes", "image_shape", "mean", "std", "scale")


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        best: the best epoch so far.
        epoch: the number (from 1) of the epoch under way; when one is over it is the next one's.
        step: steps taken in all.
        batches: steps taken in this epoch.
        loss, correct, images: sums over the images of this epoch so far.
        evaluated: whether nothing of what these steps ask for is left to evaluate.
        train, validation: the scores of the last epoch that was evaluated.
    """

    best: Best
    epoch: int = 1
    step: int = 0
    batches: int = 0
    loss: float = 0.0
    correct: int = 0
    images: int = 0
    evaluated: bool = True
    train: Score | None = None
    validation: Score | None = None

    @property
    def epochs_done(self) -> int:
        """Epochs that have been trained on, counting one that has only begun."""
        return self.epoch - (self.batches == 0)

    def after(self, losses: Sequence[float], correct: int, sizes: Sequence[int]) -> Progress:
        """Some steps later: the mean loss of each one's batch, their correct answers, and the sizes of the batches."""
        loss = self.loss
        for x, size in zip(losses, sizes, strict=True):
            loss += x * size  # step by step, so that the sum does not depend on where a run was stopped
        return replace(
            self,
            step=self.step + len(sizes),
            batches=self.batches + len(sizes),
            loss=loss,
            correct=self.correct + correct,
            images=self.images + sum(sizes),
            evaluated=False,
        )

    def evaluated_as(self, best: Best, train: Score, validation: Score | None, steps_per_epoch: int) -> Progress:
        """After the evaluation of what has been trained of this epoch: at the next one's beginning if that is all."""
        found = replace(self, best=best, evaluated=True, train=train, validation=validation)
        if self.batches < steps_per_epoch:
            return found
        return replace(found, epoch=self.epoch + 1, batches=0, loss=0.0, correct=0, images=0)

    def score(self) -> Score:
        """The means over the images of this epoch so far."""
        return Score(self.loss / self.images, self.correct / self.images)


@dataclass(frozen=True)
class Checkpoint:
    """A state, whose leaves are NumPy arrays that nobody writes to, and how far the run had come with it."""

    state: TrainState
    progress: Progress

    def on_device(self, device: str) -> TrainState:
        """The state on `device`, in memory of its own."""
        return tree.map(lambda x: array(x, device=device), self.state)


def fetch(state: TrainState) -> Callable[[], TrainState]:
    """The state's arrays on their way to the host, as `Checkpoint` holds them; the next step may consume the state."""
    waits = tree.map(lambda x: x.fetch(), state)
    return lambda: tree.map(lambda wait: wait(), waits)


def finite(state: TrainState) -> bool:
    """Whether all numbers of a checkpoint's state are finite."""
    return all(np.isfinite(x).all() for x in tree.leaves(state))


@dataclass(frozen=True)
class Origin:
    """What a checkpoint file says of the run that wrote it: see `encode`."""

    path: Path
    config_text: str
    data: dict[str, Any]
    steps_per_epoch: int
    progress: Progress
    file: tensor_file.TensorFile = field(repr=False)

    def config(self, overrides: Sequence[str] = ()) -> Config:
        """The run's config, with `overrides` as `config.load` takes them. Raises ConfigError as that does."""
        return config.parse(self.config_text.encode(), self.path, overrides)

    def load(self, experiment: Experiment) -> Checkpoint:
        """The checkpoint, for a run of `experiment`.

        Raises AdtrainError, before an array is read, where they are not those of its network and optimizer.
        """
        expected = experiment.drawn_state("cpu")
        arrays = self.file.read(_names(expected), "the config's network and optimizer")
        state: TrainState = tree.unflatten(tree.flatten(expected)[1], list(arrays.values()))
        if int(np.asarray(state.step)) != self.progress.step:
            raise _damaged(self.path, f"its optimizer is at step {state.step}, its progress at {self.progress.step}")
        return Checkpoint(state, self.progress)


def encode(experiment: Experiment, checkpoint: Checkpoint) -> bytes:
    """The content of a checkpoint file.

    Weights and running statistics have the names that they have in model.safetensors, the optimizer's arrays theirs
    behind `optimizer.`.
    """
    about = {
        **model_file.about(experiment),
        "kind": KIND,
        "format": FORMAT,
        "seed": experiment.config.training.seed,
        "steps_per_epoch": experiment.steps_per_epoch,
        "progress": asdict(_plain(checkpoint.progress)),
    }
    return tensor_file.encode(_names(checkpoint.state), about)


def data_numbers(experiment: Experiment) -> dict[str, Any]:
    """What a checkpoint says of the data that it was trained on: `Origin.data`."""
    about = model_file.about(experiment)
    return {name: about[name] for name in DATA_NUMBERS}


def read(path: Path) -> Origin:
    """What the checkpoint file at `path` says of itself; its arrays are not read yet.

    Raises AdtrainError: it is missing, damaged, no checkpoint, or of a format that is newer than this adtrain.
    """
    if not path.is_file():
        found = "a folder" if path.exists() else "nothing"
        raise AdtrainError(f"{path}: found {found}, expected a run's folder or a checkpoint")
    file = tensor_file.TensorFile(path)
    about = file.about
    if about.get("kind") != KIND:
        raise AdtrainError(f"{path}: is no checkpoint; expected a run's last.safetensors or best.safetensors")
    if about.get("format") != FORMAT:
        writer = str(about.get("version"))[:40]
        raise AdtrainError(
            f"{path}: has checkpoint format {str(about.get('format'))[:40]}, written by adtrain {writer!r}; "
            f"this one reads format {FORMAT}"
        )
    text, steps_per_epoch = about.get("config"), about.get("steps_per_epoch")
    if not isinstance(text, str) or not isinstance(steps_per_epoch, int):
        raise _damaged(path, "it does not say what it was trained with")
    numbers = {name: about.get(name) for name in DATA_NUMBERS}
    return Origin(path, text, numbers, steps_per_epoch, _progress(path, about.get("progress")), file)


def _names(state: TrainState) -> dict[str, Any]:
    names = tensor_file.named
    return {**names(state.params), **names(state.statistics), **names(state.optimizer, tensor_file.OPTIMIZER)}


def _plain(progress: Progress) -> Any:
    """The progress with its scores as lists, as JSON gives them back."""
    train, validation = (score and list(score) for score in (progress.train, progress.validation))
    return replace(progress, train=train, validation=validation)  # type: ignore[arg-type]


def _progress(path: Path, value: Any) -> Progress:
    """The progress that JSON of `encode` holds; nothing in it is believed."""
    try:
        best = Best(**value["best"])
        progress = Progress(**{**value, "best": best})
        train, validation = (None if x is None else Score(*x) for x in (progress.train, progress.validation))
    except (TypeError, KeyError):
        raise _damaged(path, "it does not say how far the run had come") from None
    progress = replace(progress, train=train, validation=validation)
    counts = (progress.epoch - 1, progress.step, progress.batches, progress.correct, progress.images, best.epoch)
    numbers = [progress.loss, *(train or ()), *(validation or ()), *(x for x in (best.value, best.to_beat) if x)]
    plausible = (
        all(type(x) is int and 0 <= x < 2**53 for x in (*counts, best.waited))
        and all(type(x) in (int, float) and math.isfinite(x) for x in numbers)
        and type(best.by) is str
        and type(progress.evaluated) is bool
        and progress.batches <= progress.step
        and progress.correct <= progress.images
        and (progress.batches == 0) == (progress.images == 0)
    )
    if not plausible:
        raise _damaged(path, "its counters are none that a run can have")
    return progress


def _damaged(path: Path, reason: str) -> AdtrainError:
    return AdtrainError(f"{path}: is damaged: {reason}")
