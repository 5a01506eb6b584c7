"""Types of values in configs and records: those beside `adtrain.option_types`, and those of options.

The options of a class have the types of its annotations: int, float, bool, str, Literal, tuples, X | None.
`Annotated[float, Bounds(gt=0)]` has bounds; `adtrain.option_types` has names for common types with bounds.
"""

from __future__ import annotations

import re
import unicodedata
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from pydantic import AfterValidator, Field, Strict

from adtrain.core.errors import OptionError
from adtrain.core.options import NOUNS, Bounds, Expected, InConfig, Matches, bounds_of, split, words
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
TargetScaling = Annotated[Bool | Literal["robust"], Expected("true, false or robust")]
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
    tuple[Number, Number], AfterValidator(_ascending), Expected("a number and a greater one, such as [0, 1]")
]
Box = Annotated[
    dict[Variable, Interval],
    Field(min_length=1),
    Expected(
        "variables with the least and the greatest number of each, such as {t: [0, 1], x1: [-1, 1]}; "
        "the name of one is a letter, which digits may follow"
    ),
]
Solution = Annotated[
    Text | dict[OutputName, Text],
    Expected("an expression, expressions by the names of outputs, or the name of a file .csv or .npy"),
]
Coefficients = Annotated[dict[OutputName, Number], Expected("names with initial values, such as {k: 1.0}")]
Outputs = Annotated[tuple[OutputName, ...], Field(min_length=1), Expected("a list of names such as [u, v]")]
Places = Annotated[
    dict[
        Text,
        Annotated[
            Number | Annotated[tuple[Number, ...], Field(min_length=1)], Expected("a number or a list of numbers")
        ],
    ],
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


def option_type(hint: Any) -> Any:
    """The type of a config's value for an option with this annotation.

    Raises OptionError for an annotation that no value of a config fits.
    """
    base, marks = split(hint)
    for mark in marks:
        if isinstance(mark, InConfig):
            return option_type(mark.type)
    if get_origin(base) in (Union, UnionType) and NoneType in get_args(base):
        others = [inner for inner in get_args(base) if inner is not NoneType]
        return option_type(Union[tuple(others)]) | None  # noqa: UP007
    return Annotated[_strict(hint), Expected(words(hint))]


def _strict(hint: Any) -> Any:
    """The annotation without conversions: true is not an integer, and "3" is not a number."""
    base, marks = split(hint)
    origin, inner = get_origin(base), get_args(base)
    if base in NOUNS:
        return Annotated[base, bounds_of(base, marks)]
    strict: Any
    if base is bool:
        strict = Bool
    elif base is str:
        strict = str if any(isinstance(mark, Matches) for mark in marks) else Text
    elif origin is Literal:
        strict = base
    elif origin is tuple:
        strict = tuple[tuple(x if x is ... else _strict(x) for x in inner)]  # type: ignore[misc]
    elif origin in (Union, UnionType):
        strict = Union[tuple(map(_strict, inner))]  # noqa: UP007
    else:
        shown = base.__name__ if isinstance(base, type) else str(base)
        expected = "int, float, bool, str, Literal, a tuple of them, or X | None"
        raise OptionError(f"has the type {shown}, expected {expected}")
    return Annotated[(strict, *marks)] if marks else strict
