"""The whole config: its sections, and where each value was written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    create_model,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from adtrain import docstrings
from adtrain.config import sweep_section
from adtrain.config.problems import ConfigError, PathParts, Problem, dotted
from adtrain.config.records import (
    BestBy,
    Bool,
    Box,
    Coefficients,
    FinalModel,
    MicroBatch,
    Name,
    NamesOfOthers,
    Outputs,
    Precision,
    Seed,
    Sha256,
    ShapeOrVariables,
    Shards,
    Solution,
    TargetScaling,
    View,
    option_type,
)
from adtrain.config.schema import WORDS
from adtrain.config.source import Node
from adtrain.config.specs import (
    SCHEDULES,
    Augmentation,
    Average,
    DataSource,
    Layers,
    Loss,
    Metric,
    Optimizer,
    Schedule,
    specs_as_unions,
)
from adtrain.data import text_file
from adtrain.data.formats import FORMATS, Options, of_name
from adtrain.data.points import TABLES, FieldKind, PointOptions
from adtrain.option_types import Fraction, NonNegative, Patterns, Positive, Size, Text

POINT_OPTIONS = tuple(option.name for option in fields(PointOptions))


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


class _Source(Section):
    """Where the examples are."""

    dataset: DataSource | None = Field(
        None, description="a data set of the catalogue, such as mnist, or one of a plug-in with its options"
    )
    path: Text | None = Field(None, description=f"instead of dataset: {', '.join(x.title for x in FORMATS)}")


def _option_fields(options: type, of: Callable[[str], str]) -> dict[str, Any]:
    """Fields for a dataclass of options: type, default and meaning are those of its annotations and docstrings.

    `of` gives the data that have the option of a name; empty if all have it. Other options are null where they are not
    given, so that a config has none of other data.
    """
    found: dict[str, Any] = {}
    hints, meanings = get_type_hints(options, include_extras=True), docstrings.attributes(options)
    for option in fields(options):
        kind, meaning, default = option_type(hints[option.name]), meanings[option.name], option.default
        if those := of(option.name):
            shown = ", ".join(default) if isinstance(default, tuple) else str(default).lower()
            meaning = f"{those}: {meaning}" + (f"; default: {shown}" if default not in (None, ()) else "")
            default = None
        found[option.name] = (kind | None if default is None else kind, Field(default, description=meaning))
    return found


def _formats_with(option: str) -> str:
    return ", ".join(x.name for x in FORMATS if option in x.own_options)


if TYPE_CHECKING:
    _Files = _Source
else:
    _Files = create_model("Files", __base__=_Source, __module__=__name__, **_option_fields(Options, _formats_with))


class _PointSource(_Files):
    """The points at which equations are to hold, or the data of a neural field."""

    points: Box | None = Field(
        None, description="instead of dataset and path: the interval of each variable of the equations"
    )
    reference: Solution | None = Field(
        None,
        description="points: the solution, for the relative error: an expression of the variables, for several outputs "
        "one by the name of each, or a file .csv or .npy with columns for variables and outputs",
    )

    image: Text | None = Field(
        None, description="instead of dataset, path and points: a PNG or JPEG file, which a neural field learns"
    )
    volume: Text | None = Field(
        None, description="the same for an .npy file of 1 to 4 axes, with a number for each element"
    )
    peak: Positive | None = Field(
        None,
        description="image, volume: the largest minus the smallest possible number, for the PSNR; default: 1, as for "
        "images, whose numbers are in [0, 1]",
    )

    @property
    def field(self) -> tuple[FieldKind, Path] | None:
        """The kind and the file of the data of a neural field; None for other data."""
        given: dict[FieldKind, str | None] = {"image": self.image, "volume": self.volume}
        return next(((kind, Path(file)) for kind, file in given.items() if file is not None), None)

    @property
    def sets_steps_per_epoch(self) -> bool:
        """Whether `steps_per_epoch` is the length of an epoch, as for points and fields; otherwise the data give it."""
        return self.points is not None or self.field is not None

    @property
    def reference_file(self) -> str | None:
        """The file with the solution; None where it is an expression or unknown."""
        return self.reference if isinstance(self.reference, str) and self.reference.endswith(TABLES) else None


if TYPE_CHECKING:
    _Points = _PointSource
else:
    _Points = create_model(
        "Points", __base__=_PointSource, __module__=__name__, **_option_fields(PointOptions, lambda _: "points")
    )


class Data(_Points):
    """What to train on: a data set, files, points or a field, and how a batch is made of them."""

    batch_size: Size = Field(128, description="images per training step; all, if there are fewer")
    shards: Shards | None = Field(
        None,
        description="parts of each batch, a power of two: gradients are computed for each part and added in a fixed "
        "order, so any number of ranks that divides it gives the same result; default: the number of ranks",
    )
    validation: Fraction = Field(0.0, description="the fraction of the training images held out for validation")
    normalize: Bool = Field(True, description="subtract the mean and divide by the standard deviation of each channel")
    normalize_targets: TargetScaling = Field(
        False,
        description="mse, l1, huber: train on targets minus their mean, divided by their standard deviation; robust: "
        "leave targets more than 3 interquartile ranges from the quartiles out of mean and standard deviation",
    )
    augment: list[Augmentation] | None = Field(None, description="random changes of each training batch, in this order")
    views: list[View] | None = Field(
        None,
        description="views of each evaluated image, whose probabilities are averaged: flip adds the mirror image, "
        "shift the image moved by one pixel in two directions",
    )

    @property
    def options(self) -> Options:
        """How the files are read: the options that are given, with the defaults of the others."""
        return Options(**self._given(Options))

    @property
    def point_options(self) -> PointOptions:
        """How points are drawn: the options that are given, with the defaults of the others."""
        return PointOptions(**self._given(PointOptions))

    def _given(self, options: type) -> dict[str, Any]:
        return {x.name: value for x in fields(options) if (value := getattr(self, x.name)) is not None}

    @property
    def is_text(self) -> bool:
        """Whether the data are the characters, bytes or tokens of a text."""
        return self.examples == text_file.FORMAT.examples

    @property
    def has_reference(self) -> bool:
        """Whether the solution of the equations is known."""
        return self.reference is not None or self.point_options.sdf is not None

    @property
    def _of_files(self) -> list[str]:
        """The given keys, of those of this class, that points or a field cannot have."""
        found: dict[str, Any] = {"augment": self.augment, "views": self.views, "validation": self.validation}
        if self.points is not None:
            found["normalize_targets"] = self.normalize_targets
        return [name for name, value in found.items() if value]

    @property
    def examples(self) -> str:
        """What the data are: "points", "sequences" of a text, "rows" of a table, "images", or else "examples"."""
        if self.sets_steps_per_epoch:
            return "points"
        if self.options.unit == "token":  # of a text file, or of a folder
            return text_file.FORMAT.examples
        if self.dataset is not None:
            from adtrain.data.catalogue import CATALOGUE

            return "images" if self.dataset.kind in CATALOGUE else "examples"
        found = None if self.path is None else of_name(self.path, self.options.format)
        return "images" if found is None else found.examples

    @model_validator(mode="after")
    def _check_sources(self) -> Data:
        sources = [name for name in ("dataset", "path", "points", "image", "volume") if getattr(self, name) is not None]
        if not sources:
            raise PydanticCustomError("expected", "either dataset or path")
        if len(sources) > 1:
            raise PydanticCustomError("expected", f"only one of {' and '.join(sources)} (null for the other)")
        options = self.options
        own = [name for name in ("reference", *POINT_OPTIONS) if getattr(self, name) is not None]
        if self.field is not None:
            own = [name for name in own if name != "steps_per_epoch"]
        elif self.peak is not None:
            raise PydanticCustomError("expected", "image or volume together with peak")
        if self.points is None and own:
            raise PydanticCustomError("expected", f"points together with {own[0]}")
        if self.sets_steps_per_epoch and (others := [*options.given, *self._of_files]):
            raise PydanticCustomError("expected", f"no {others[0]} together with {sources[0]}")
        of_points = self.point_options
        if of_points.sdf is not None and (twice := {"reference", "measurements"}.intersection(own)):
            raise PydanticCustomError("expected", f"no {min(twice)} together with sdf, which has both")
        if "sdf_points" in own and of_points.sdf is None:
            raise PydanticCustomError("expected", "sdf together with sdf_points")
        if of_points.adaptive and of_points.resample != "step":
            raise PydanticCustomError("expected", "resample: step together with adaptive")
        if options.test_path is not None and options.test:
            raise PydanticCustomError("expected", "at most one of test and test_path")
        if options.label is not None and options.target is not None:
            raise PydanticCustomError("expected", "at most one of label and target")
        return self


def _without_default(schema: dict[str, Any]) -> None:
    del schema["default"]


class Model(Section):
    """The network: its input and its layers, first to last."""

    input: ShapeOrVariables = Field(
        (),
        description="the shape of one input: [1, 28, 28] for an image, [28, 28] for its rows, [784] to flatten it; "
        "default: the shape of the data, as rows if the first layer is recurrent, flat if it is linear; for equations "
        "their variables: [t, x]",
        json_schema_extra=_without_default,
    )
    output: Outputs | None = Field(None, description="for equations: the names of the outputs: [u]")
    coefficients: Coefficients | None = Field(
        None, description="for equations: numbers that are trained with the network, with their initial values"
    )
    layers: Layers = Field(description="a list of layers")

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of the inputs, if they have names."""
        return tuple(name for name in self.input if isinstance(name, str))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input; () if it is not known yet."""
        sizes = tuple(size for size in self.input if isinstance(size, int))
        return (len(self.variables),) if self.variables else sizes

    @model_serializer(mode="wrap")
    def _written(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = written(self)
        return values if self.input else {"layers": values["layers"]}


GROUP = "no_decay, or a mapping such as {paths: 0.*, lr_factor: 2}"
"""What a parameter group must be, in words."""


class ParameterGroup(Section):
    """Parameters whose paths match a pattern, and what differs for them; `no_decay` is a group with a name.

    A parameter has the options of all groups that match it. Where two groups set the same option, the later one counts.
    """

    paths: Patterns = Field(
        description="a pattern such as *.bias, or a list of them; vectors: all arrays of one axis, such as biases and "
        "weights of normalisation layers"
    )
    lr_factor: Positive | None = Field(None, description="a factor on the learning rate")
    weight_decay: NonNegative | None = Field(None, description="in place of the optimizer's weight decay")
    trainable: Bool | None = Field(None, description="false: the parameters keep their initial values")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if isinstance(value, str):
            if value != "no_decay":
                raise PydanticCustomError("expected", GROUP)
            from adtrain.optim.groups import VECTORS

            return {"paths": VECTORS, "weight_decay": 0.0}
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        options = handler.resolve_ref_schema(handler(schema))
        named = dict(options)
        options.clear()
        options |= {"anyOf": [{"const": "no_decay", WORDS: GROUP}, named]}
        return options


class Lora(Section):
    """Train small matrices, whose products are added to weights, in place of the network's parameters."""

    rank: Size = Field(description="the number of rows of the first matrix and of columns of the second")
    paths: Patterns = Field(
        "*",
        description="the weights of linear layers and attention: a pattern such as *.self_attn.*, or a list of them",
    )


class EarlyStopping(Section):
    """End training early. The model is then the best epoch's, unless `final_model` says otherwise."""

    patience: Size = Field(description="epochs without an improvement of best_by after which training ends")
    min_delta: NonNegative = Field(0.0, description="an improvement of best_by must be larger than this")


class Training(Section):
    """How long and how to train."""

    epochs: Size | None = Field(None, description="passes over the training images; default: as many as steps need")
    steps: Size | None = Field(
        None, description="training ends after this many steps, or after the epochs if that is earlier"
    )
    seed: Seed = Field(
        0, description="the seed of initial weights, order of images, dropout, augmentation and validation split"
    )
    precision: Precision = Field(
        "float32",
        description="float32 or float64: the type of all numbers; tf32 or bfloat16, on a GPU: float32, but operands of "
        "matrix products and convolutions are rounded to this type where that saves time; with bfloat16 activations "
        "and gradients in memory, too",
    )
    clip_norm: Positive | None = Field(None, description="scale the gradients down so that their norm is at most this")
    clip_value: Positive | None = Field(None, description="clamp each element of the gradients to plus or minus this")
    micro_batch: MicroBatch | None = Field(
        None,
        description="the most examples of a batch whose gradients are computed at a time, to save memory; auto: as "
        "many as the device has memory for; sets data.shards",
    )
    average: Average | None = Field(
        None, description="an average of the weights over the steps, which is evaluated and saved as the model"
    )
    init_from: Text | None = Field(None, description="a run's folder, model or checkpoint with the initial weights")
    init_partial: Bool | None = Field(None, description="take only the arrays of init_from that fit by name and shape")
    names: NamesOfOthers | None = Field(
        None,
        description="init_from is a file of another program: which of its arrays are those of this network",
    )
    checkpoint_every: Size | None = Field(
        None, description="steps between checkpoints, in addition to those after each epoch"
    )
    validate_every: Size | None = Field(
        None,
        description="steps between evaluations on the validation examples, in addition to those after each epoch, "
        "which alone decide on the best epoch",
    )
    best_by: BestBy | None = Field(
        None,
        description="the metric that selects the best epoch, of the task or of training.metrics, and among epochs of "
        "equal value the loss; "
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
        description="metrics in addition to those of the task: of the validation images after each epoch, and of the "
        "test images at the end; most are for classes",
    )
    early_stopping: EarlyStopping | None = Field(None, description="when to end before the last epoch")

    @model_validator(mode="after")
    def _check_key_combinations(self) -> Training:
        if self.epochs is None and self.steps is None:
            raise PydanticCustomError("expected", "a number for epochs or steps")
        if self.clip_norm is not None and self.clip_value is not None:
            raise PydanticCustomError("expected", "at most one of clip_norm and clip_value")
        if self.init_partial is not None and self.init_from is None:
            raise PydanticCustomError("expected", "init_from together with init_partial")
        if self.names is not None and self.init_from is None:
            raise PydanticCustomError("expected", "init_from together with names")
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


Sweep = Annotated[dict[str, Any], WithJsonSchema(sweep_section.SCHEMA)]
"""The trainings of a sweep; `sweep_section` reads it. The keys are paths into the config, and these options."""


class Config(Section):
    """A training job. `load` reads it from a file; `build` makes its model, loss, optimizer and schedule."""

    name: Name = Field(
        "run",
        description="the job's name; default: the file's without its suffix, with a hyphen for other characters",
    )
    plugins: list[Plugin] | None = Field(None, description="Python files with layers, losses and others of your own")
    data: Data = Field(description="what to train on")
    model: Model = Field(description="the network")
    loss: Loss = Field(description="a loss, such as cross_entropy, or a list of equations")
    optimizer: Optimizer = Field(description="an optimizer, such as adam")
    parameter_groups: list[ParameterGroup] | None = Field(
        None,
        description="parameters with another learning rate or weight decay, or that are not trained; no_decay: no "
        "weight decay for arrays of one axis, such as biases",
    )
    lora: Lora | None = Field(
        None, description="low-rank adaptation: train small matrices beside weights, and nothing else"
    )
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

    def without_seed(self) -> Config:
        """The config with seed 0, which is equal for trainings that differ in their seeds."""
        return self.changed("training", seed=0)

    def changed(self, section: str, **values: Any) -> Config:
        """The config with other values in a section. They are not checked."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

    def where(self, path: PathParts) -> str:
        """`file:line:col` of the value at `path`, for error messages."""
        return self._source.root.find(path)[1]

    def error_at(self, path: PathParts, message: str) -> ConfigError:
        """A ConfigError about the value at `path`, with its position in the file."""
        return ConfigError([Problem(self.where(path), dotted(path), message)])


class _WithWords(GenerateJsonSchema):
    """Adds to each schema what a value must be, in words. A chain checks that a value is a mapping, then its items."""

    def custom_error_schema(self, schema: core_schema.CustomErrorSchema) -> dict[str, Any]:
        return {**super().custom_error_schema(schema), WORDS: schema["custom_error_message"]}

    def chain_schema(self, schema: core_schema.ChainSchema) -> dict[str, Any]:
        mapping, values = map(self.generate_inner, schema["steps"])
        return {**values, WORDS: mapping[WORDS]}


def json_schema() -> dict[str, Any]:
    """The JSON Schema of configs, which `config.schema` reads from `configs/schema.json`."""
    with specs_as_unions(Data, Model, Training, Config):
        return Config.model_json_schema(schema_generator=_WithWords)
