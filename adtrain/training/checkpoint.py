"""Checkpoints: everything that a run needs to continue as if it had never been stopped.

Random numbers are functions of the config's seed and the step (for the order of the images: the epoch). So these two
counters are the complete random state. A checkpoint depends neither on the time nor on how often the run was stopped:
the same step of the same config gives the same bytes.
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
DATA_FIELDS = ("classes", "image_shape", "mean", "std", "scale")


@dataclass(frozen=True)
class Progress:
    """The position of a run in its training.

    Attributes:
        best: the best epoch so far.
        epoch: the number of the current epoch, from 1; between two epochs, the number of the next one.
        step: steps taken in total.
        batches: steps taken in this epoch.
        loss, correct, images: sums over the images of this epoch so far.
        evaluated: whether the weights have been evaluated since the last step.
        train, validation: the scores of the last evaluated epoch.
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
        """Epochs trained on, including one that is only partly done."""
        return self.epoch - (self.batches == 0)

    def after(self, losses: Sequence[float], correct: int, sizes: Sequence[int]) -> Progress:
        """The progress after more steps, from the mean loss and the size of each step's batch, and the correct count.

        `correct` is the sum over all the batches.
        """
        loss = self.loss
        for x, size in zip(losses, sizes, strict=True):
            loss += x * size  # one step at a time: the rounding must not depend on where a run was stopped
        return replace(
            self,
            step=self.step + len(sizes),
            batches=self.batches + len(sizes),
            loss=loss,
            correct=self.correct + correct,
            images=self.images + sum(sizes),
            evaluated=False,
        )

    def after_evaluation(self, best: Best, train: Score, validation: Score | None, steps_per_epoch: int) -> Progress:
        """The progress after an evaluation with these scores. It moves to the next epoch if this one is complete."""
        updated = replace(self, best=best, evaluated=True, train=train, validation=validation)
        if self.batches < steps_per_epoch:
            return updated
        return replace(updated, epoch=self.epoch + 1, batches=0, loss=0.0, correct=0, images=0)

    def score(self) -> Score:
        """The means over the images of this epoch so far."""
        return Score(self.loss / self.images, self.correct / self.images)


@dataclass(frozen=True)
class Checkpoint:
    """A training state on the host and the run's progress at that state. The leaves are NumPy arrays, never written."""

    state: TrainState
    progress: Progress

    def on_device(self, device: str) -> TrainState:
        """A copy of the state on `device`."""
        return tree.map(lambda x: array(x, device=device), self.state)


def fetch(state: TrainState) -> Callable[[], TrainState]:
    """Start to copy the state to the host; the returned function waits for the copy and returns it as NumPy arrays.

    The next step may overwrite `state` as soon as this function has returned.
    """
    waits = tree.map(lambda x: x.fetch(), state)
    return lambda: tree.map(lambda wait: wait(), waits)


def finite(state: TrainState) -> bool:
    """Whether a checkpoint's state contains only finite numbers."""
    return all(np.isfinite(x).all() for x in tree.leaves(state))


@dataclass(frozen=True)
class CheckpointFile:
    """The metadata of a checkpoint file, as `encode` writes them; `load` reads the arrays."""

    path: Path
    config_text: str
    data: dict[str, Any]
    steps_per_epoch: int
    progress: Progress
    file: tensor_file.TensorFile = field(repr=False)

    def config(self, overrides: Sequence[str] = ()) -> Config:
        """The run's config with `overrides` applied. Arguments and ConfigError are those of `config.load`."""
        return config.parse(self.config_text.encode(), self.path, overrides)

    def load(self, experiment: Experiment) -> Checkpoint:
        """Read the checkpoint for a run of `experiment`.

        Raises AdtrainError where the arrays do not fit the experiment's network and optimizer (checked before any array
        is read), or hold numbers that are not finite.
        """
        expected = experiment.random_initial_state("cpu")
        arrays = self.file.read(_names(expected), "the config's network and optimizer")
        state: TrainState = tree.unflatten(tree.flatten(expected)[1], list(arrays.values()))
        if int(np.asarray(state.step)) != self.progress.step:
            raise _damaged(self.path, f"its optimizer is at step {state.step}, its progress at {self.progress.step}")
        return Checkpoint(state, self.progress)


def encode(experiment: Experiment, checkpoint: Checkpoint) -> bytes:
    """The content of a checkpoint file.

    Weights and running statistics have the same names as in model.safetensors. The names of the optimizer's arrays
    begin with `optimizer.`.
    """
    about = {
        **model_file.about(experiment),
        "kind": KIND,
        "format": FORMAT,
        "seed": experiment.config.training.seed,
        "steps_per_epoch": experiment.steps_per_epoch,
        "progress": asdict(_json_values(checkpoint.progress)),
    }
    return tensor_file.encode(_names(checkpoint.state), about)


def data_metadata(experiment: Experiment) -> dict[str, Any]:
    """The metadata about the training data that a checkpoint stores: `CheckpointFile.data`."""
    about = model_file.about(experiment)
    return {name: about[name] for name in DATA_FIELDS}


def read(path: Path) -> CheckpointFile:
    """Read the metadata of the checkpoint file at `path`, but not its arrays.

    Raises AdtrainError where the file is missing, damaged, not a checkpoint, or of an unknown format.
    """
    if not path.is_file():
        found = "a folder" if path.exists() else "nothing"
        raise AdtrainError(f"{path}: found {found}, expected a run's folder or a checkpoint")
    file = tensor_file.TensorFile(path)
    about = file.about
    if about.get("kind") != KIND:
        raise AdtrainError(f"{path}: is not a checkpoint; expected a run's last.safetensors or best.safetensors")
    if about.get("format") != FORMAT:
        writer = str(about.get("version"))[:40]
        raise AdtrainError(
            f"{path}: has checkpoint format {str(about.get('format'))[:40]}, written by adtrain {writer!r}; "
            f"this version reads format {FORMAT}"
        )
    text, steps_per_epoch = about.get("config"), about.get("steps_per_epoch")
    if not isinstance(text, str) or not isinstance(steps_per_epoch, int):
        raise _damaged(path, "its metadata lack the config")
    numbers = {name: about.get(name) for name in DATA_FIELDS}
    return CheckpointFile(path, text, numbers, steps_per_epoch, _progress(path, about.get("progress")), file)


def _names(state: TrainState) -> dict[str, Any]:
    model = tensor_file.named(state.params, state.statistics)
    return {**model, **tensor_file.named(state.optimizer, prefix=tensor_file.OPTIMIZER)}


def _json_values(progress: Progress) -> Any:
    """The progress with its scores as lists, which is how JSON returns them."""
    train, validation = (score and list(score) for score in (progress.train, progress.validation))
    return replace(progress, train=train, validation=validation)  # type: ignore[arg-type]


def _progress(path: Path, value: Any) -> Progress:
    """Parse and check the progress in a checkpoint's metadata. AdtrainError where it is malformed or impossible."""
    try:
        best = Best(**value["best"])
        progress = Progress(**{**value, "best": best})
        train, validation = (None if x is None else Score(*x) for x in (progress.train, progress.validation))
    except (TypeError, KeyError):
        raise _damaged(path, "its progress is malformed") from None
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
        raise _damaged(path, "its counters are impossible")
    return progress


def _damaged(path: Path, reason: str) -> AdtrainError:
    return AdtrainError(f"{path}: is damaged: {reason}")
