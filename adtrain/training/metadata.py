"""The metadata of model.safetensors and of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from adtrain.config.values import Seed, Sha256
from adtrain.data.datasets import ClassType
from adtrain.data.table_encoder import TableEncoder
from adtrain.option_types import Number, Positive, Size
from adtrain.training.experiment import Experiment
from adtrain.training.progress import Progress
from adtrain.version import __version__

FORMAT = 3
KIND = "checkpoint"
DATA_FIELDS = ("classes", "image_shape", "mean", "std", "scale", "targets", "target_mean", "target_std", "class_type")


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

    def data(self) -> dict[str, Any]:
        """What the training data decide, for messages: fields, and with an encoder the number of each feature."""
        found = {name: getattr(self, name) for name in DATA_FIELDS}
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
    )


def of_checkpoint(experiment: Experiment, progress: Progress) -> CheckpointMetadata:
    return CheckpointMetadata(
        **vars(of_model(experiment)),
        kind=KIND,
        format=FORMAT,
        seed=experiment.config.training.seed,
        steps_per_epoch=experiment.steps_per_epoch,
        digests=experiment.digests,
        progress=progress,
    )
