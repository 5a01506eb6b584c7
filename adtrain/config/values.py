"""Types of values in configs and records, beside those of `adtrain.option_types`."""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, Strict

from adtrain.core.options import Bounds, Expected, words
from adtrain.equations import NAME, VARIABLE
from adtrain.option_types import Number, Patterns, Shape, Size, Text

LIMIT = 1e300
"""The limit of measured numbers: sums and differences of a few stay finite."""

MAX_NAME = 100
"""The largest length of a name in UTF-8. File systems take 255 bytes; the name of a folder gets an ending."""


def name_of(text: str) -> str:
    """The name of a job whose config has this file name without its suffix: "net-1" for "net (1)".

    Each run of characters that a name cannot have becomes a hyphen.
    """
    text = unicodedata.normalize("NFC", text)
    if not _is_name(text):
        text = "".join(x if _in_names(x) and x != " " else "\0" for x in text)
        text = re.sub("\0+", "-", text).lstrip("-._").encode()[:MAX_NAME].decode(errors="ignore").rstrip("-")
    return text or "run"


def _is_name(text: str) -> bool:
    return 0 < len(text.encode(errors="replace")) <= MAX_NAME and text[0] not in " ._-" and all(map(_in_names, text))


def _in_names(character: str) -> bool:
    """Whether a name can have this letter, mark, digit or sign."""
    return character in " ._-" or unicodedata.category(character)[0] in "LMN"


def _checked_name(text: str) -> str:
    if not _is_name(text):
        raise ValueError
    return text


Bool = Annotated[bool, Strict(), Expected("true or false")]
Name = Annotated[
    str,
    Strict(),
    Field(pattern="^[A-Za-z0-9\u0080-\U0010ffff][A-Za-z0-9._ \u0080-\U0010ffff-]{0,99}$"),
    AfterValidator(_checked_name),
    Expected(f"a name of at most {MAX_NAME} bytes: letters, digits, '.', '_', '-' and spaces, a letter or digit first"),
]
Seed = Annotated[int, Bounds(ge=0, lt=2**64)]
Shards = Annotated[
    Literal[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096], Expected("a power of two, at most 4096")
]
MicroBatch = Size | Literal["auto"]
Sha256 = Annotated[str, Strict(), Field(pattern="^[0-9a-f]{64}$"), Expected("64 hexadecimal digits")]
Total = Annotated[int, Bounds(ge=0, lt=2**53)]
BestBy = Annotated[
    str,
    Strict(),
    Field(pattern=r"^(train|validation)_\w+$"),
    Expected("train_ or validation_ with a metric, such as validation_loss"),
]
Measured = Annotated[float, Bounds(ge=-LIMIT, le=LIMIT)]
Duration = Annotated[float, Bounds(ge=0, le=LIMIT)]
Milliseconds = Annotated[float, Bounds(ge=-1e15, le=1e15)]
WarmUp = Annotated[float, Bounds(ge=0, lt=2**31)]
Variable = Annotated[
    str, Strict(), Field(pattern=f"^{VARIABLE}$"), Expected("names of variables, a letter and digits such as x or x1")
]
OutputName = Annotated[
    str, Strict(), Field(pattern=f"^{NAME}$"), Expected("names of letters and digits, a letter first, such as u")
]
Variables = Annotated[tuple[Variable, ...], Field(min_length=1)]
ShapeOrVariables = Annotated[
    Shape | Variables, Expected("a list of 1 or more integers in [1, 2^31), or of variables such as [t, x]")
]


def _ascending(interval: tuple[float, float]) -> tuple[float, float]:
    if not interval[0] < interval[1]:
        raise ValueError
    return interval


Interval = Annotated[
    tuple[Number, Number], AfterValidator(_ascending), Expected("the least and the greatest number, such as [0, 1]")
]
Box = Annotated[
    dict[Variable, Interval],
    Field(min_length=1),
    Expected("variables with the least and the greatest number of each, such as {t: [0, 1], x: [-1, 1]}"),
]
Solution = Annotated[
    Text | dict[OutputName, Text],
    Expected("an expression, expressions by the names of outputs, or the name of a file .csv or .npy"),
]
Coefficients = Annotated[dict[OutputName, Number], Expected("names with initial values, such as {k: 1.0}")]
Outputs = Annotated[tuple[OutputName, ...], Field(min_length=1), Expected("a list of names such as [u, v]")]
Places = Annotated[
    dict[Text, Number | Annotated[tuple[Number, ...], Field(min_length=1)]],
    Field(min_length=1),
    Expected("variables with a number or several, such as {t: 0} or {x: [-1, 1]}"),
]


def one_of(literal: Any) -> Any:
    """The Literal type with the description `one of none, tanh`."""
    return Annotated[literal, Expected(words(literal))]


if TYPE_CHECKING:
    Precision: TypeAlias = str
    FinalModel: TypeAlias = str
    NamesOfOthers: TypeAlias = str | dict[str, str | tuple[str, ...]]
    View: TypeAlias = str
else:
    Precision = one_of(Literal["float32", "tf32", "bfloat16", "float64"])
    FinalModel = one_of(Literal["best", "last"])
    NamesOfOthers = Annotated[
        Literal["gpt2", "llama", "vit", "vit_torchvision", "resnet18", "resnet50"] | dict[Text, Patterns],
        Expected(
            "one of gpt2, llama, vit, vit_torchvision, resnet18, resnet50, or a table from paths of this network to "
            "names of arrays, or lists of names"
        ),
    ]
    View = one_of(Literal["flip", "shift"])
