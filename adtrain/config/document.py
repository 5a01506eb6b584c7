"""The whole config: its sections, and where each value was written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PrivateAttr,
    RootModel,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from adtrain import docstrings
from adtrain.config import sweep_section
from adtrain.config.problems import ConfigError, PathParts, Problem, dotted
from adtrain.config.source import Node
from adtrain.config.specs import SCHEDULES, Augmentation, DataSource, Layers, Loss, Metric, Optimizer, Schedule
from adtrain.config.values import (
    BestBy,
    Bool,
    Channels,
    Column,
    Columns,
    Delimiter,
    Encoding,
    FileFormat,
    FinalModel,
    ImageShape,
    ImageSize,
    Missing,
    MissingValues,
    Name,
    Precision,
    Seed,
    Sha256,
    Shards,
    Targets,
    Text,
    Unit,
)
from adtrain.data.csv_file import is_table
from adtrain.data.options import MISSING_VALUES
from adtrain.data.text_file import is_text
from adtrain.option_types import Fraction, NonNegative, Positive, Shape, Size


@dataclass(frozen=True)
class Source:
    """The file of a config and its parsed nodes. Configs with different sources can be equal."""

    path: Path | None = field(default=None, compare=False)
    root: Node = field(default_factory=lambda: Node("config"), compare=False)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls.__doc__ = docstrings.of(cls)


class Data(Section):
    """What to train on: a data set of the catalogue, or the user's files."""

    dataset: DataSource | None = Field(
        None, description="a data set of the catalogue, such as mnist, or one of a plug-in with its options"
    )
    path: Text | None = Field(
        None,
        description="instead of dataset: a folder of IDX files, an NPZ file, a CSV file, a text file, or a folder of "
        "images with a subfolder per class",
    )
    test_path: Text | None = Field(None, description="a second file or folder of the same format, with the test part")
    test: Fraction = Field(0.0, description="the fraction held out as the test part, if the files have none")
    label: Column | None = Field(None, description="CSV: the column of the labels, by name or number; default: label")
    target: Targets | None = Field(
        None, description="CSV: the column or columns of numbers to predict, by name or number, instead of label"
    )
    header: Bool | None = Field(None, description="CSV: whether the first line names the columns; default: detected")
    delimiter: Delimiter | None = Field(
        None, description="CSV: the character between two columns; default: a tab in .tsv files, a comma in others"
    )
    drop: Columns | None = Field(None, description="CSV: columns that are not read, by name or number")
    categories: Columns | None = Field(
        None, description="CSV: columns whose values are categories even if they look like numbers"
    )
    category_encoding: Encoding | None = Field(
        None,
        description="CSV: one_hot (default): a feature for each category; index: one feature, the category's number, "
        "for a layer embedding",
    )
    missing: Missing | None = Field(
        None,
        description="CSV: what to do with an empty cell: fill it with mean or zero, drop its row, or error (default)",
    )
    missing_values: MissingValues | None = Field(
        None,
        description="CSV: the texts and numbers that stand for an empty cell; default: "
        f"{', '.join(MISSING_VALUES)}, in upper and lower case",
    )
    shape: ImageShape | None = Field(None, description="CSV, NPZ: [channels, height, width] of images in flat rows")
    image_size: ImageSize | None = Field(None, description="image folder: [height, width] to resize all images to")
    channels: Channels | None = Field(
        None, description="image folder: 1 for grey, 3 for colour; default: 3 if any image is in colour"
    )
    skip_broken: Bool = Field(False, description="image folder: skip images that cannot be read, with a warning")
    format: FileFormat | None = Field(
        None,
        description="read a file of any name as a table (csv) or as a text (text); default: the format is detected",
    )
    length: Size | None = Field(None, description="text: characters or bytes in an input sequence; default: 128")
    unit: Unit | None = Field(None, description="text: what a class is: a character (default) or a byte")
    batch_size: Size = Field(128, description="images per training step; all, if there are fewer")
    shards: Shards | None = Field(
        None,
        description="parts of each batch, a power of two: gradients are computed for each part and added in a fixed "
        "order, so any number of ranks that divides it gives the same result; default: the number of ranks",
    )
    validation: Fraction = Field(0.0, description="the fraction of the training images held out for validation")
    normalize: Bool = Field(True, description="subtract the mean and divide by the standard deviation of each channel")
    normalize_targets: Bool = Field(
        False, description="mse, l1, huber: train on targets minus their mean, divided by their standard deviation"
    )
    augment: list[Augmentation] | None = Field(None, description="random changes of each training batch, in this order")

    @property
    def is_text(self) -> bool:
        """Whether the data are the characters or bytes of a text."""
        return self.path is not None and is_text(self.path, self.format)

    @property
    def examples(self) -> str:
        """What the data consist of: "sequences" of a text, "rows" of a table, or "images"."""
        if self.is_text:
            return "sequences"
        return "rows" if self.path is not None and is_table(self.path, self.format) else "images"

    @model_validator(mode="after")
    def _check_sources(self) -> Data:
        if self.dataset is None and self.path is None:
            raise PydanticCustomError("expected", "either dataset or path")
        if self.dataset is not None and self.path is not None:
            raise PydanticCustomError("expected", "only one of dataset and path (null for the other)")
        if self.test_path is not None and self.test:
            raise PydanticCustomError("expected", "at most one of test and test_path")
        if self.label is not None and self.target is not None:
            raise PydanticCustomError("expected", "at most one of label and target")
        return self


def _without_default(schema: dict[str, Any]) -> None:
    del schema["default"]


class Model(Section):
    """The network: its input and its layers, first to last."""

    input: Shape = Field(
        (),
        description="the shape of one input: [1, 28, 28] for an image, [28, 28] for its rows, [784] to flatten it; "
        "default: the shape of the data, as rows if the first layer is recurrent, flat if it is linear",
        json_schema_extra=_without_default,
    )
    layers: Layers = Field(description="a list of layers")

    @model_serializer(mode="wrap")
    def _written(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = written(self)
        return values if self.input else {"layers": values["layers"]}


class EarlyStopping(Section):
    """End training early. The model is then the best epoch's, unless `final_model` says otherwise."""

    patience: Size = Field(description="epochs without an improvement of best_by after which training ends")
    min_delta: NonNegative = Field(0.0, description="an improvement of best_by must be larger than this")


class Training(Section):
    """How long and how to train."""

    epochs: Size = Field(description="passes over the training images")
    steps: Size | None = Field(None, description="training ends after this many steps, or after all epochs")
    seed: Seed = Field(
        0, description="the seed of initial weights, order of images, dropout, augmentation and validation split"
    )
    precision: Precision = Field(
        "float32",
        description="float32 or float64: the type of all numbers; tf32 or bfloat16, on a GPU: float32, but operands of "
        "matrix products and convolutions are rounded to this type where that saves time",
    )
    clip_norm: Positive | None = Field(None, description="scale the gradients down so that their norm is at most this")
    clip_value: Positive | None = Field(None, description="clamp each element of the gradients to plus or minus this")
    init_from: Text | None = Field(None, description="a run's folder, model or checkpoint with the initial weights")
    init_partial: Bool | None = Field(None, description="take only the arrays of init_from that fit by name and shape")
    checkpoint_every: Size | None = Field(
        None, description="steps between checkpoints, in addition to those after each epoch"
    )
    best_by: BestBy | None = Field(
        None,
        description="the metric that selects the best epoch, of the task or of training.metrics; "
        "default: validation_accuracy (validation_rmse for numbers, validation_f1 for several labels, "
        "validation_perplexity for text), or train_loss without validation images",
    )
    final_model: FinalModel | None = Field(
        None,
        description="the epoch whose weights the run ends with: best by best_by, or last; default: best with "
        "validation images or early_stopping, otherwise last",
    )
    metrics: list[Metric] | None = Field(
        None,
        description="metrics of a classification, in addition to the accuracy: of the validation images after each "
        "epoch, and of the test images at the end",
    )
    early_stopping: EarlyStopping | None = Field(None, description="when to end before the last epoch")

    @model_validator(mode="after")
    def _check_key_combinations(self) -> Training:
        if self.clip_norm is not None and self.clip_value is not None:
            raise PydanticCustomError("expected", "at most one of clip_norm and clip_value")
        if self.init_partial is not None and self.init_from is None:
            raise PydanticCustomError("expected", "init_from together with init_partial")
        return self


class Plugin(Section):
    """A file of Python code that is run before the config is read; in YAML, the file alone or with its hash."""

    file: Text = Field(
        description="a Python file, relative to the config's folder, or the name of an installed plug-in"
    )
    sha256: Sha256 | None = Field(None, description="the SHA-256 that the file must have")
    files: dict[Text, Sha256] | None = Field(
        None, description="the SHA-256 that the files of its kernels must have, by their paths from the file's folder"
    )

    @model_validator(mode="before")
    @classmethod
    def _file_of(cls, value: Any) -> Any:
        return {"file": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        options = handler.resolve_ref_schema(handler(schema))
        named = dict(options)
        options.clear()
        options |= {"anyOf": [named["properties"]["file"], named]}
        return options


class Sweep(RootModel[dict[str, Any]]):
    """The trainings of a sweep; `sweep_section` reads it. The keys are paths into the config, and these options."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return dict(sweep_section.SCHEMA)


class Config(Section):
    """A training job. `load` reads it from a file; `build` makes its model, loss, optimizer and schedule."""

    name: Name = Field(
        "run",
        description="the job's name; default: the file's without its suffix, with a hyphen for other characters",
    )
    plugins: list[Plugin] | None = Field(None, description="Python files with layers, losses and others of your own")
    data: Data = Field(description="what to train on")
    model: Model = Field(description="the network")
    loss: Loss = Field(description="a loss, such as cross_entropy")
    optimizer: Optimizer = Field(description="an optimizer, such as adam")
    schedule: Schedule = Field(
        default_factory=lambda: SCHEDULES["constant"](), description="a learning-rate schedule, such as cosine"
    )
    training: Training = Field(description="how long and how to train")
    sweep: Sweep | None = Field(
        None,
        description="for adtrain sweep: values of other keys by their dotted paths, each a list, a range or samples",
    )
    _source: Source = PrivateAttr(default_factory=Source)

    @property
    def source(self) -> Source:
        """The file of the config and its parsed nodes."""
        return self._source

    def where(self, path: PathParts) -> str:
        """`file:line:col` of the value at `path`, for error messages."""
        return self._source.root.find(path)[1]

    def error_at(self, path: PathParts, message: str) -> ConfigError:
        """A ConfigError about the value at `path`, with its position in the file."""
        return ConfigError([Problem(self.where(path), dotted(path), message)])
