"""The types of options in configs, from the annotations of a class: int, float, bool, str, Literal, tuples, X | None.

`Annotated[float, Bounds(gt=0)]` has bounds; `adtrain.option_types` has names for common types with bounds.
"""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from adtrain.config.values import Bool
from adtrain.core.errors import OptionError
from adtrain.core.options import NOUNS, Expected, InConfig, Matches, bounds_of, split, words
from adtrain.option_types import Text


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
