"""Types of values in configs and records: those beside `adtrain.option_types`, and those of options.

JSON that adtrain has written is read, as untrusted input, into dataclasses with these types. Also how configs differ.

The options of a class have the types of its annotations: int, float, bool, str, Literal, tuples, X | None.
`Annotated[float, Bounds(gt=0)]` has bounds; `adtrain.option_types` has names for common types with bounds.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, Discriminator, Field, Strict, Tag, TypeAdapter, ValidationError, WrapValidator
from pydantic_core import from_json

from adtrain.config.problems import PathParts, dotted, found
from adtrain.core.errors import AdtrainError, OptionError
from adtrain.core.options import NOUNS, Bounds, Expected, InConfig, Matches, bounds_of, split, words
from adtrain.equations import NAME, VARIABLE
from adtrain.files import read_file, write_atomic
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
    Field(pattern=r"^[^\x00-/:-@\[-`{-\x7f][^\x00-\x1f!-,/:-@\[-^`{-\x7f]{0,99}$"),  # without other ASCII characters
    AfterValidator(_checked_name),
    Expected(f"a name of at most {MAX_NAME} bytes: letters, digits, '.', '_', '-' and spaces, a letter or digit first"),
]
TargetScaling = Annotated[Bool | Literal["robust"], Expected("true, false or robust")]
Seed = Annotated[int, Bounds(ge=0, lt=2**64)]
Shards = Annotated[
    Literal[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096], Expected("a power of two, at most 4096")
]
MicroBatch = Annotated[Size | Literal["auto"], Expected("an integer in [1, 2^31), or auto")]
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


T = TypeVar("T")


class RecordError(AdtrainError):
    """JSON that is not a record of the expected type; one line that names place, key, found and expected."""


def by(field: str) -> Any:
    """Annotates a union of dataclasses whose `field` tells which one a record is."""
    return Field(discriminator=field)


def chosen_by(name_of: Callable[[Any], str]) -> Any:
    """Annotates a union whose members are annotated by `named`; `name_of` tells which one a record is."""
    return Discriminator(lambda value: f"({name_of(value)})")


def named(name: str) -> Any:
    """Annotates a member of a union of `chosen_by`."""
    return Tag(f"({name})")


def otherwise(value: object) -> Any:
    """Annotates a type whose wrong values are read as `value`."""

    def read(given: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(given)
        except ValidationError:
            return value

    return WrapValidator(read)


def plain(value: Any, sparse: bool = False) -> Any:
    """A record as JSON values: a dataclass or named tuple becomes a dict by its fields.

    If `sparse`, a field that has its default is left out. A surrogate, which stands for a byte of a file name that is
    not UTF-8, becomes its escape: JSON cannot have it.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if is_dataclass(value):
        given = ((field, getattr(value, field.name)) for field in fields(value))
        return {x.name: plain(found, sparse) for x, found in given if not (sparse and found == x.default)}
    if hasattr(value, "_asdict"):
        return plain(value._asdict(), sparse)
    if isinstance(value, Mapping):
        return {plain(key): plain(item, sparse) for key, item in value.items()}
    return [plain(item, sparse) for item in value] if isinstance(value, (list, tuple)) else value


def parse(kind: Any, content: bytes | str, where: str) -> Any:
    """The record in JSON `content`.

    Args:
        kind: a dataclass, or a union of dataclasses; values must have exactly the annotated types.
        where: the file, for messages; also its line, if the file has several records.

    Raises RecordError, which names the first key whose value is missing or wrong.
    """
    try:
        return _adapter(kind).validate_json(content, strict=True)
    except ValidationError as error:
        raise RecordError(f"{where}: {_problem(error)}") from None


def read(kind: type[T], path: Path) -> T:
    """The record in a JSON file. Raises AdtrainError where the file cannot be read, or as `parse`."""
    found: T = parse(kind, read_file(path), str(path))
    return found


def write(path: Path, record: object) -> None:
    """Replace a JSON file by a record. Raises AdtrainError where it cannot be written."""
    write_atomic(path, json.dumps(plain(record), indent=2, allow_nan=False).encode() + b"\n")


def parse_any(content: bytes, where: str) -> Any:
    """Any JSON value without NaN and infinity. Raises RecordError."""
    try:
        value = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise RecordError(f"{where}: found no valid JSON ({error}), expected a file that adtrain wrote") from None
    infinite = next((path for path, x in leaves(value) if x in (math.inf, -math.inf)), None)
    if infinite is not None:
        raise RecordError(f"{where}: {dotted(infinite)}: found a number beyond 1.8e308, expected a finite number")
    return value


def leaves(value: Any, path: PathParts = ()) -> Iterator[tuple[PathParts, Any]]:
    """The values of a JSON document that are neither object nor array, with their keys."""
    if isinstance(value, (dict, list)):
        for part, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, part))
    else:
        yield path, value


def check(kind: Any, value: Any, where: str) -> Any:
    """The record in a value of `parse_any`; `where` also names its key. Raises RecordError as `parse` does."""
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise RecordError(f"{where}: {_problem(error)}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _problem(error: ValidationError) -> str:
    details = error.errors(include_url=False)[0]
    path = tuple(part for part in details["loc"] if not str(part).startswith("("))  # "(Kind)" is a member of a union
    key, value, message = dotted(path), details["input"], details["msg"]
    match details["type"]:
        case "json_invalid":
            return f"found no valid JSON ({message.removeprefix('Invalid JSON: ')}), expected a file that adtrain wrote"
        case "dataclass_type" | "dict_type":
            message = "an object"
        case "extra_forbidden":
            return f"{key}: unknown key"
        case "missing":
            return f"found no key {key}, expected a file that adtrain wrote"
        case "union_tag_invalid" | "union_tag_not_found":
            name = details["ctx"]["discriminator"].strip("'")
            value = value.get(name) if isinstance(value, dict) else value
            return f"{name}: found {found(value)}, expected one that adtrain writes"
    expected = message.removeprefix("Input should be ")
    return f"{key}{': ' if key else ''}found {found(value)}, expected {expected[:1].lower()}{expected[1:]}"


def differences(values: Sequence[Any], path: PathParts = ()) -> dict[str, list[Any]]:
    """Compare one value per config; maps the dotted keys that differ to all values, None where a key is missing.

    Mappings, and lists of equal length, are compared recursively. Mappings with a single key are choices, such as an
    optimizer or a layer: different choices are one difference, not one for each option.
    """
    if all(value == values[0] for value in values):
        return {}
    parts: Iterable[str | int] = ()
    if all(isinstance(value, dict) for value in values) and not _other_choice(values):
        parts = dict.fromkeys(key for value in values for key in value)
        inner = [[value.get(part) for value in values] for part in parts]
    elif all(isinstance(value, list) and len(value) == len(values[0]) for value in values):
        parts = range(len(values[0]))
        inner = [[value[part] for value in values] for part in parts]
    else:
        return {dotted(path): list(values)}
    found: dict[str, list[Any]] = {}
    for part, below in zip(parts, inner, strict=True):
        found |= differences(below, (*path, part))
    return found


def _other_choice(values: Sequence[dict[str, Any]]) -> bool:
    return all(len(value) == 1 for value in values) and any(value.keys() != values[0].keys() for value in values)


def value_text(value: Any, brief: bool = False) -> str:
    """A config value on one line. With `brief`, a choice such as a layer is shortened to its name."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case list():
            return f"[{', '.join(value_text(item, brief=True) for item in value)}]"
        case dict() if brief:
            return ", ".join(value)
        case dict():
            return ", ".join(f"{key} {value_text(item)}" for key, item in value.items())
    return str(value)


def rounded_text(value: Any, brief: bool = False) -> str:
    """As `value_text`, but floats are rounded to four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else value_text(value, brief)
