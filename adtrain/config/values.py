"""Types of option values: a Python type, its bounds, and their description for error messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

from pydantic import Field, GetCoreSchemaHandler, Strict
from pydantic_core import CoreSchema, core_schema

from adtrain import nn
from adtrain.metrics import MetricName


class Expected:
    """Annotates a type with a description of its values, which replaces pydantic's error messages."""

    def __init__(self, words: str) -> None:
        self.words = words

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.custom_error_schema(
            handler(source), custom_error_type="expected", custom_error_message=self.words
        )


_Integer = Annotated[int, Strict()]
LARGEST = 3.4e38
"""The largest number of an option: a step in float32 cannot hold more."""
_Number = Annotated[float, Strict(), Field(allow_inf_nan=False, ge=-LARGEST, le=LARGEST)]
_Size = Annotated[_Integer, Field(ge=1, lt=2**31)]
_Count = Annotated[_Integer, Field(ge=0, lt=2**31)]
_Fraction = Annotated[_Number, Field(ge=0, lt=1)]
_Epochs = Annotated[_Number, Field(gt=0, lt=2**31)]

LIMIT = 1e300
"""The limit of measured numbers: sums and differences of a few stay finite."""
_Measurement = Annotated[float, Strict(), Field(allow_inf_nan=False, ge=-LIMIT, le=LIMIT)]

Bool = Annotated[bool, Strict(), Expected("true or false")]
Text = Annotated[
    str, Strict(), Field(pattern=r"^[^\x00]+$"), Expected("a string of UTF-8 text, not empty and without NUL")
]
Name = Annotated[
    str,
    Strict(),
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]{0,99}$"),
    Expected("a name of at most 100 letters, digits, '.', '_', '-' and spaces, a letter or digit first"),
]
Seed = Annotated[_Integer, Field(ge=0, lt=2**64), Expected("an integer in [0, 2^64)")]
Sha256 = Annotated[str, Strict(), Field(pattern="^[0-9a-f]{64}$"), Expected("64 hexadecimal digits")]
Size = Annotated[_Size, Expected("a positive integer below 2^31")]
Count = Annotated[_Count, Expected("an integer in [0, 2^31)")]
SizePair = Annotated[_Size | tuple[_Size, _Size], Expected("a positive integer or a list of two")]
CountPair = Annotated[_Count | tuple[_Count, _Count], Expected("an integer of at least 0 or a list of two")]
Padding = Annotated[
    _Count | tuple[_Count, _Count] | Literal["same"], Expected("an integer of at least 0, a list of two, or 'same'")
]
Total = Annotated[_Integer, Field(ge=0, lt=2**53), Expected("an integer in [0, 2^53)")]
ImageSize = Annotated[tuple[_Size, _Size], Expected("a list of height and width")]
ImageShape = Annotated[tuple[_Size, _Size, _Size], Expected("a list of channels, height and width")]
Channels = Annotated[Literal[1, 3], Expected("1 or 3")]
_Column = Annotated[_Integer, Field(gt=-(2**31), lt=2**31)] | Annotated[str, Strict(), Field(min_length=1)]
Column = Annotated[_Column, Expected("the name of a column, or its number")]
Targets = Annotated[
    _Column | Annotated[tuple[_Column, ...], Field(min_length=1)],
    Expected("the name of a column or its number, or a list of them"),
]
Columns = Annotated[tuple[Column, ...], Expected("a list of names or numbers of columns")]
Delimiter = Annotated[
    str, Strict(), Field(pattern=r'^[^"\r\n\x00]$'), Expected("one character other than a quote or the end of a line")
]
Shape = Annotated[tuple[_Size, ...], Field(min_length=1), Expected("a list of positive integers")]
SizeOrShape = Annotated[
    _Size | Annotated[tuple[_Size, ...], Field(min_length=1)], Expected("a positive integer or a list of them")
]
Indices = Annotated[tuple[_Count, ...], Field(min_length=1), Expected("a list of integers of at least 0")]
OpenShape = Annotated[
    tuple[_Size | Literal[-1], ...],
    Field(min_length=1),
    Expected("a list of positive integers, of which one may be -1"),
]
Axis = Annotated[_Integer, Field(ge=-64, le=64), Expected("an integer, the number of an axis")]

Number = Annotated[_Number, Expected("a finite number, at most 3.4e38 in size")]
Positive = Annotated[_Number, Field(gt=0), Expected("a finite number above 0, at most 3.4e38")]
NonNegative = Annotated[_Number, Field(ge=0), Expected("a finite number of at least 0, at most 3.4e38")]
Measured = Annotated[_Measurement, Expected(f"a number of magnitude at most {LIMIT:g}")]
Duration = Annotated[_Measurement, Field(ge=0), Expected(f"a number in [0, {LIMIT:g}]")]
Milliseconds = Annotated[_Measurement, Field(ge=-1e15, le=1e15), Expected("a number of magnitude at most 1e15")]
AtLeastOne = Annotated[_Number, Field(ge=1), Expected("a finite number of at least 1, at most 3.4e38")]
Fraction = Annotated[_Fraction, Expected("a number in [0, 1)")]
Degrees = Annotated[_Number, Field(ge=0, le=360), Expected("a number of degrees in [0, 360]")]
Probability = Annotated[_Number, Field(ge=0, le=1), Expected("a number in [0, 1]")]
Fractions = Annotated[tuple[_Fraction, _Fraction], Expected("a list of two numbers in [0, 1)")]
Epochs = Annotated[_Epochs, Expected("a number above 0 and below 2^31")]
EpochList = Annotated[tuple[_Epochs, ...], Field(min_length=1), Expected("a list of numbers above 0 and below 2^31")]
ClassWeights = Annotated[
    tuple[Annotated[_Number, Field(ge=0)], ...],
    Field(min_length=1),
    Expected("a list of finite numbers of at least 0, at most 3.4e38, one for each class"),
]
WarmUp = Annotated[_Number, Field(ge=0, lt=2**31), Expected("a number in [0, 2^31)")]


def one_of(literal: Any) -> Any:
    """The Literal type with the description `one of none, tanh`."""
    return Annotated[literal, Expected(f"one of {', '.join(get_args(literal))}")]


if TYPE_CHECKING:
    Missing: TypeAlias = str
    Encoding: TypeAlias = str
    Precision: TypeAlias = str
    BestBy: TypeAlias = str
else:
    Missing = one_of(Literal["error", "mean", "zero", "drop"])
    Encoding = one_of(Literal["one_hot", "index"])
    Precision = one_of(Literal["float32", "tf32", "bfloat16", "float64"])
    BestBy = one_of(
        Literal[
            "validation_accuracy", "validation_f1", "validation_rmse", "validation_mae", "validation_r2",
            "validation_loss", "train_accuracy", "train_f1", "train_rmse", "train_mae", "train_r2", "train_loss",
        ]
    )  # fmt: skip

MetricNames = Annotated[tuple[MetricName, ...], Expected(f"a list of some of {', '.join(get_args(MetricName))}")]

OPTIONS: dict[str, Any] = {
    "affine": Bool,
    "alpha": Number,
    "approximate": one_of(Literal["none", "tanh"]),
    "betas": Fractions,
    "bias": Bool,
    "delta": Positive,
    "deviation": NonNegative,
    "dilation": SizePair,
    "dim": Axis,
    "div_factor": AtLeastOne,
    "elementwise_affine": Bool,
    "embedding_dim": Size,
    "eps": NonNegative,
    "final": NonNegative,
    "final_div_factor": AtLeastOne,
    "gamma": NonNegative,
    "groups": Size,
    "in_channels": Size,
    "in_features": Size,
    "indices": Indices,
    "kernel_size": SizePair,
    "label_smoothing": Fraction,
    "lr": Positive,
    "milestones": EpochList,
    "momentum": Fraction,
    "negative_slope": Number,
    "nesterov": Bool,
    "normalized_shape": SizeOrShape,
    "num_channels": Size,
    "num_embeddings": Size,
    "num_features": Size,
    "num_groups": Size,
    "out_channels": Size,
    "out_features": Size,
    "output_padding": CountPair,
    "output_size": SizePair,
    "p": Fraction,
    "padding": CountPair,
    "pct_start": Fraction,
    "pos_weight": ClassWeights,
    "probability": Probability,
    "rotation": Degrees,
    "scale": Fraction,
    "shape": OpenShape,
    "shift": Fraction,
    "size": Size,
    "step_size": Epochs,
    "stride": SizePair,
    "weight": ClassWeights,
    "weight_decay": NonNegative,
    "weight_init": one_of(nn.WeightInit),
    "conv2d.padding": Padding,
    "crop.padding": Count,
    "mixup.alpha": Positive,
    "rmsprop.alpha": Fraction,
}
"""The type of each option of a layer, loss, optimizer, schedule or augmentation; `kind.name` overrides `name`."""
