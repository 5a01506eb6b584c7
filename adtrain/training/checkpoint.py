"""Checkpoints: everything that a run needs to continue as if it had never been stopped; and their metadata.

The random numbers of a step follow from the config's seed and the number of the step, and the order of the examples
from the seed and the number of the epoch. So these two numbers are the complete random state. The same step of the same
config gives the same bytes, whenever it is taken and however often the run was stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from adtrain import __version__, config
from adtrain.config import Config
from adtrain.config.plugged import Loader, keep
from adtrain.config.problems import found
from adtrain.config.records import Seed, Sha256
from adtrain.core import tree
from adtrain.core.array import array
from adtrain.core.errors import AdtrainError
from adtrain.data.datasets import ClassType
from adtrain.data.table_encoder import TableEncoder
from adtrain.data.tokenizer import Tokenizer
from adtrain.option_types import Number, Positive, Size
from adtrain.training import tensor_file
from adtrain.training.experiment import Experiment
from adtrain.training.progress import Progress
from adtrain.training.step import TrainState
from adtrain.training.tasks import plausible

FORMAT = 3
KIND = "checkpoint"
DATA_FIELDS = ("classes", "image_shape", "mean", "std", "scale", "targets", "target_mean", "target_std")


@dataclass(frozen=True)
class ModelMetadata:
    """What is needed to apply a model to images, besides its arrays.

    Attributes:
        config: the resolved config, as YAML.
        image_shape: (C, H, W).
        mean, std, scale: those of the `Network`.
        encoder: makes the images of a table's rows; None for other data.
        targets, target_mean, target_std: the names of the numbers to predict, and those of the training part.
        class_type: the type of the labels whose texts `classes` has; "str" in files that do not say it.
        tokenizer: that of a text of tokens; None for other data.
    """

    version: str
    config: str
    classes: tuple[str, ...]
    image_shape: tuple[Size, Size, Size]
    mean: tuple[Number, ...]
    std: tuple[Positive, ...]
    scale: Positive
    encoder: TableEncoder | None
    targets: tuple[str, ...]
    target_mean: tuple[Number, ...]
    target_std: tuple[Positive, ...]
    class_type: ClassType = field(default="str", kw_only=True)
    tokenizer: Tokenizer | None = field(default=None, kw_only=True)

    def data(self) -> dict[str, Any]:
        """What the training data decide, for messages: fields, and with an encoder the number of each feature."""
        found = {name: getattr(self, name) for name in DATA_FIELDS}
        if self.tokenizer is not None:
            del found["classes"]
            found["tokenizer"] = f"SHA-256 {self.tokenizer.digest[:12]}"
        if self.encoder is not None:
            names = (name if name.isprintable() else repr(name) for name in self.encoder.features)
            found |= {f"feature {name}": number for number, name in enumerate(names)}
            found["values of empty cells"] = self.encoder.fill
        return found


@dataclass(frozen=True)
class CheckpointMetadata(ModelMetadata):
    """What is needed to continue a run, besides its arrays. `digests` are those of `Experiment`."""

    kind: str
    format: int
    seed: Seed
    steps_per_epoch: Size
    digests: dict[str, Sha256]
    progress: Progress


@dataclass(frozen=True)
class Kind:
    """The kind and format of a file's metadata, which tell whether it is a checkpoint that can be read."""

    kind: Any = None
    format: Any = None
    version: Any = None


def of_model(experiment: Experiment) -> ModelMetadata:
    network = experiment.network
    return ModelMetadata(
        version=__version__,
        config=experiment.config_text,
        classes=experiment.data.classes,
        image_shape=experiment.image_shape,
        mean=network.mean,
        std=network.std,
        scale=network.scale,
        encoder=experiment.data.encoder,
        targets=experiment.data.targets,
        target_mean=experiment.data.target_mean,
        target_std=experiment.data.target_std,
        class_type=experiment.data.class_type,
        tokenizer=experiment.data.tokenizer,
    )


@dataclass(frozen=True)
class Checkpoint:
    """A training state on the host and the run's progress at that state. Its NumPy arrays must not be written to."""

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


@dataclass(frozen=True)
class CheckpointFile:
    """A checkpoint file with its metadata; `load` reads the arrays."""

    path: Path
    metadata: CheckpointMetadata
    file: tensor_file.TensorFile = field(repr=False)

    @property
    def progress(self) -> Progress:
        return self.metadata.progress

    def config(self, overrides: Sequence[str] = (), run_plugin: Loader = keep) -> Config:
        """The run's config with `overrides` applied. Arguments and ConfigError are those of `config.load`.

        By default no plug-in is run: those of the run have been run already.
        """
        return config.parse(self.metadata.config.encode(), self.path, overrides, run_plugin=run_plugin)

    def load(self, experiment: Experiment) -> Checkpoint:
        """Read the checkpoint for a run of `experiment`.

        Raises AdtrainError where the arrays do not fit the experiment's network and optimizer (checked before any array
        is read), or hold numbers that are not finite.
        """
        expected = experiment.state_types
        arrays = self.file.read(named_state(expected), "the config's network and optimizer")
        state: TrainState = tree.unflatten(tree.flatten(expected)[1], list(arrays.values()))
        if int(np.asarray(state.step)) != self.progress.step:
            raise _damaged(self.path, f"its optimizer is at step {state.step}, its progress at {self.progress.step}")
        if not plausible(experiment.network.task, self.progress.sums, self.progress.images):
            raise _damaged(self.path, "its counters are impossible")
        return Checkpoint(state, self.progress)


def encode(experiment: Experiment, checkpoint: Checkpoint) -> Sequence[bytes | memoryview]:
    """The content of a checkpoint file, in parts.

    Weights and running statistics have the same names as in model.safetensors. The names of the optimizer's arrays
    begin with `optimizer.`.
    """
    about = CheckpointMetadata(
        **vars(of_model(experiment)),
        kind=KIND,
        format=FORMAT,
        seed=experiment.config.training.seed,
        steps_per_epoch=experiment.steps_per_epoch,
        digests=experiment.digests,
        progress=checkpoint.progress,
    )
    return tensor_file.parts(named_state(checkpoint.state), about)


def read(path: Path) -> CheckpointFile:
    """Read the metadata of the checkpoint file at `path`, but not its arrays.

    Raises AdtrainError where the file is missing, damaged, not a checkpoint, or of an unknown format.
    """
    if not path.is_file():
        kind = "a folder" if path.exists() else "nothing"
        raise AdtrainError(f"{path}: found {kind}, expected a run's folder or a checkpoint")
    file = tensor_file.TensorFile(path)
    about = file.metadata(Kind)
    if about.kind != KIND:
        raise AdtrainError(f"{path}: is not a checkpoint; expected a run's last.safetensors or best.safetensors")
    if about.format != FORMAT:
        raise AdtrainError(
            f"{path}: has checkpoint format {found(about.format)}, written by adtrain {found(about.version)}; "
            f"this version reads format {FORMAT}"
        )
    record = file.metadata(CheckpointMetadata)
    progress = record.progress
    if progress.batches > progress.step or (progress.batches == 0) != (progress.images == 0):
        raise _damaged(path, "its counters are impossible")
    return CheckpointFile(path, record, file)


def named_state(state: TrainState, prefix: str = "") -> dict[str, Any]:
    """The arrays of a state by their names in a file, each after `prefix`."""
    model = tensor_file.named(state.params, state.statistics, prefix=prefix)
    return {**model, **tensor_file.named(state.optimizer, prefix=prefix + tensor_file.OPTIMIZER)}


def _damaged(path: Path, reason: str) -> AdtrainError:
    return AdtrainError(f"{path}: is damaged: {reason}")
