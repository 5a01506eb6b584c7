"""The types of options, from the annotations of a class: int, float, bool, str, Literal, tuples of them, or X | None.

`Annotated[float, Field(gt=0)]` has bounds; the types of `adtrain.option_types` have bounds and words for errors.
"""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from adtrain.config.values import Bool, Text, one_of
from adtrain.core.errors import OptionError
from adtrain.option_types import LARGEST, Bounds, Expected, InConfig

SCALARS: dict[Any, Any] = {
    bool: Bool,
    int: Annotated[int, Bounds(ge=-(2**63), lt=2**63)],
    float: Annotated[float, Bounds(ge=-LARGEST, le=LARGEST)],
    str: Text,
}
WORDS = {bool: "true or false", int: "an integer", float: "a finite number", str: "a string", NoneType: "null"}


def option_type(hint: Any) -> Any:
    """The type of a config's value for an option with this annotation.

    Raises OptionError for an annotation that no value of a config fits.
    """
    if get_origin(hint) is Annotated:
        for mark in hint.__metadata__:
            if isinstance(mark, InConfig):
                return mark.type
        if any(isinstance(mark, Expected) for mark in hint.__metadata__):
            return hint
    if get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint):
        others = [inner for inner in get_args(hint) if inner is not NoneType]
        return option_type(Union[tuple(others)]) | None  # noqa: UP007
    words = _words(hint)
    described = words if get_origin(hint) is not Annotated else None  # pydantic's message names the bound
    return Annotated[_strict(hint), Expected(described)] if described else _strict(hint)


def _strict(hint: Any) -> Any:
    """The annotation without conversions: true is not an integer, and "3" is not a number."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint in SCALARS:
        return SCALARS[hint]
    if origin is Annotated:
        return Annotated[(_strict(hint.__origin__), *hint.__metadata__)]
    if origin is Literal:
        return one_of(hint)
    if origin is tuple:
        return tuple[tuple(x if x is ... else _strict(x) for x in inner)]  # type: ignore[misc]
    if origin in (Union, UnionType):
        return Union[tuple(map(_strict, inner))]  # noqa: UP007
    return hint


def _words(hint: Any) -> str:
    """The values of the annotation in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint in WORDS:
        return WORDS[hint]
    if origin is Annotated:
        return _words(hint.__origin__)
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin is tuple:
        return f"a list of {', '.join('any number of them' if x is ... else _words(x) for x in inner)}"
    if origin in (Union, UnionType):
        return " or ".join(map(_words, inner))
    shown = hint.__name__ if isinstance(hint, type) else str(hint)
    raise OptionError(f"has the type {shown}, expected int, float, bool, str, Literal, a tuple of them, or X | None")
