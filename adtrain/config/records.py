"""JSON that adtrain has written, read as untrusted input into dataclasses with the value types of configs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Discriminator, Field, Tag, TypeAdapter, ValidationError, WrapValidator
from pydantic_core import from_json

from adtrain.config.problems import PathParts, dotted, found
from adtrain.core.errors import AdtrainError
from adtrain.files import read_file, write_atomic

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
