"""The whole config: its sections, and where each value was written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from adtrain.config.problems import ConfigError, PathParts, Problem, dotted
from adtrain.config.source import Node
from adtrain.config.specs import SCHEDULES, Augmentation, Layers, Loss, Optimizer, Schedule
from adtrain.config.values import (
    BestBy,
    Bool,
    Channels,
    Column,
    Fraction,
    ImageShape,
    ImageSize,
    Name,
    NonNegative,
    Positive,
    Precision,
    Seed,
    Shape,
    Size,
    Text,
)


@dataclass(frozen=True)
class Source:
    """The file a config was read from and its text as nodes; no part of what the config says, so never compared."""

    path: Path | None = field(default=None, compare=False)
    root: Node = field(default_factory=lambda: Node("config"), compare=False)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Data(Section):
    """What to train on: a data set of the catalogue, or files of one's own."""

    dataset: Text | None = Field(None, description="the name of a data set of the catalogue, such as mnist")
    path: Text | None = Field(
        None, description="in place of dataset: a folder of IDX files, a folder of images a class, an NPZ or a CSV file"
    )
    test_path: Text | None = Field(None, description="a second file or folder of path's kind, with the test part")
    test: Fraction = Field(0.0, description="the part of the images kept for the test, where the files have none")
    label: Column | None = Field(None, description="CSV: the labels' column, by name or number; default: label")
    header: Bool | None = Field(None, description="CSV: whether the first line names the columns; default: found out")
    shape: ImageShape | None = Field(None, description="CSV, NPZ: [channels, height, width] of the images in flat rows")
    image_size: ImageSize | None = Field(None, description="image folder: [height, width], which all are resized to")
    channels: Channels | None = Field(None, description="image folder: 1 for grey, 3 for colour; default: as they are")
    skip_broken: Bool = Field(False, description="image folder: leave out those that cannot be read, with a warning")
    batch_size: Size = Field(description="images in a training step")
    validation: Fraction = Field(0.0, description="the part of the training images kept for validation")
    normalize: Bool = Field(True, description="subtract the mean and divide by the standard deviation of each channel")
    augment: list[Augmentation] | None = Field(None, description="random changes of each training batch, in this order")

    @model_validator(mode="after")
    def _one_source(self) -> Data:
        if self.dataset is None and self.path is None:
            raise PydanticCustomError("expected", "either dataset or path")
        if self.dataset is not None and self.path is not None:
            raise PydanticCustomError("expected", "only one of dataset and path (null for the other)")
        if self.test_path is not None and self.test:
            raise PydanticCustomError("expected", "at most one of test and test_path")
        return self


class Model(Section):
    """The network: its input and its layers, first to last."""

    input: Shape = Field(description="the shape of one input: [1, 28, 28] for an image, [784] to flatten it")
    layers: Layers = Field(description="a list of layers")


class EarlyStopping(Section):
    """When training ends before its epochs are over; the model is then the best one, not the last."""

    patience: Size = Field(description="epochs without an improvement of best_by after which training ends")
    min_delta: NonNegative = Field(0.0, description="what best_by must improve by to count")


class Training(Section):
    """How long and how to train."""

    epochs: Size = Field(description="passes over the training images")
    steps: Size | None = Field(None, description="a bound on training steps, reached before the epochs are over")
    seed: Seed = Field(
        0, description="the seed of initial weights, order of images, dropout, augmentation and validation split"
    )
    precision: Precision = Field(
        "float32",
        description="float32 or float64, the type of all numbers; or, on a GPU, float32 numbers whose matrix products "
        "and convolutions round their operands to tf32 or bfloat16",
    )
    clip_norm: Positive | None = Field(None, description="scale gradients down to at most this norm over all of them")
    clip_value: Positive | None = Field(None, description="bound each element of the gradients by plus and minus this")
    init_from: Text | None = Field(None, description="a run's folder, model or checkpoint to take the first weights of")
    init_partial: Bool | None = Field(None, description="take from init_from what fits by name and shape, and no more")
    checkpoint_every: Size | None = Field(None, description="steps between checkpoints, beside those after each epoch")
    best_by: BestBy | None = Field(
        None,
        description="what best.safetensors is the best by; where left out validation_accuracy, or train_loss without "
        "validation images",
    )
    early_stopping: EarlyStopping | None = Field(None, description="when to end before the epochs are over")

    @model_validator(mode="after")
    def _keys_that_go_together(self) -> Training:
        if self.clip_norm is not None and self.clip_value is not None:
            raise PydanticCustomError("expected", "at most one of clip_norm and clip_value")
        if self.init_partial is not None and self.init_from is None:
            raise PydanticCustomError("expected", "init_from beside init_partial")
        return self


class Config(Section):
    """A training job. `load` reads it from a file, `build` makes the model, loss, optimizer and schedule of it."""

    name: Name = Field(description="the job's name")
    data: Data = Field(description="what to train on")
    model: Model = Field(description="the network")
    loss: Loss = Field(description="a loss, such as cross_entropy")
    optimizer: Optimizer = Field(description="an optimizer, such as adam")
    schedule: Schedule = Field(default_factory=SCHEDULES["constant"], description="the learning rate's course")
    training: Training = Field(description="how long and how to train")
    _source: Source = PrivateAttr(default_factory=Source)

    @property
    def source(self) -> Source:
        """Where the config came from."""
        return self._source

    def where(self, path: PathParts) -> str:
        """`file:line:col` of the value at `path`, for messages."""
        return self._source.root.find(path)[1]

    def refused(self, path: PathParts, message: str) -> ConfigError:
        """The error that says what is wrong with the value at `path`, and where it was written."""
        return ConfigError([Problem(self.where(path), dotted(path), message)])
