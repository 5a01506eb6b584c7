"""Options: what the annotation of a parameter permits, in words and as a check.

The annotation is the only place that bounds an option. `fits` and `words` read it, and so do the config's specs, whose
validators pydantic makes by the method `__get_pydantic_core_schema__` of the marks. A mark is an object in an
`Annotated` type. pydantic's `Field(gt=0)` is a mark too. Classes (`CheckedArguments`) and functions (`checked_options`)
check their options by their annotations.
"""

from __future__ import annotations

import inspect
import re
from abc import ABCMeta
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache, wraps
from inspect import Parameter, Signature
from math import frexp
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

from adtrain.core.array import TracedNumber
from adtrain.core.errors import OptionError, with_article

LARGEST = 3.4e38
"""The largest number of an option: a step in float32 cannot hold more."""

Handler = Callable[[Any], dict[str, Any]]
"""What pydantic gives a mark: a function from a type to its core schema."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of a number. true is not an integer, "3" is not a number, and NaN is within no bounds."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def hold(self, number: Any) -> bool:
        """Whether the number is within the bounds."""
        return (
            (self.ge is None or number >= self.ge)
            and (self.gt is None or number > self.gt)
            and (self.le is None or number <= self.le)
            and (self.lt is None or number < self.lt)
        )

    def interval(self) -> str:
        """The bounds as text: "[0, 1)"."""
        low = f"[{_text(self.ge)}" if self.ge is not None else f"({'-inf' if self.gt is None else _text(self.gt)}"
        high = f"{_text(self.le)}]" if self.le is not None else f"{'inf' if self.lt is None else _text(self.lt)})"
        return f"{low}, {high}"

    def __get_pydantic_core_schema__(self, source: Any, handler: Handler) -> dict[str, Any]:
        schema = handler(source)
        given = {name: bound for name, bound in vars(self).items() if bound is not None}
        schema = {**schema.get("schema", schema), "strict": True, **given}  # without the words of an earlier mark
        if schema["type"] == "float":
            schema["allow_inf_nan"] = False
        bounds = Bounds(*map(schema.get, vars(self)))
        return _described(schema, f"{NOUNS[source][0]} in {bounds.interval()}")


@dataclass(frozen=True)
class Items:
    """The least number of items of a tuple."""

    least: int

    def __get_pydantic_core_schema__(self, source: Any, handler: Handler) -> dict[str, Any]:
        return _described({**handler(source), "min_length": self.least}, words(Annotated[source, self]))


@dataclass(frozen=True)
class Matches:
    """A regular expression that a whole text matches: it begins with ^ and ends with $."""

    pattern: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Handler) -> dict[str, Any]:
        schema = handler(source)
        schema = {**schema.get("schema", schema), "strict": True, "pattern": self.pattern}
        return _described(schema, f"a text that matches {self.pattern}")


@dataclass(frozen=True)
class Expected:
    """A description of the values of a type for error messages, in place of the one that `words` makes.

    An error in the value of one key of a mapping has the words of that value's type.
    """

    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Handler) -> dict[str, Any]:
        schema = handler(source)
        if schema["type"] == "dict":
            keys = {**schema, "values_schema": {"type": "any"}}
            return {"type": "chain", "steps": [_described(keys, self.words), schema]}
        return _described(schema, self.words)


def _described(schema: dict[str, Any], words: str) -> dict[str, Any]:
    """pydantic's schema whose errors have this message."""
    return {
        "type": "custom-error",
        "schema": schema,
        "custom_error_type": "expected",
        "custom_error_message": words,
    }


@dataclass(frozen=True)
class InConfig:
    """The type of the option in a config, where that differs from the type in Python."""

    type: Any


WIDEST = {int: Bounds(ge=-(2**63), lt=2**63), float: Bounds(ge=-LARGEST, le=LARGEST)}
"""The bounds of numbers whose annotation has none, or none on one side."""
NOUNS = {int: ("an integer", "integers"), float: ("a number", "numbers")}
OTHERS = {bool: "true or false", str: "a string", NoneType: "null"}
IN_PYTHON = {"true or false": "True or False", "null": "None", "a list of": "a tuple of"}
"""Words for Python, where they differ from those for a config."""


def shown(value: Any) -> str:
    """`value` in an error: its repr, or its type if that is long, has several lines or cannot be made."""
    try:
        text = repr(value)
    except Exception:  # of the user's class, or of Python for an integer of more than 4300 digits
        text = "\n"
    return text if len(text) <= 80 and "\n" not in text else with_article(type(value).__name__)


def require_function(name: str, f: Any) -> None:
    """Raise OptionError if `f`, the argument of the function `name`, is not a function."""
    if not callable(f):
        raise OptionError(f"{name}: found {shown(f)}, expected a function")


def is_integer(value: Any, least: int | None) -> bool:
    """Whether `value` is an integer, of at least `least` if that is given, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return least is None or int(value) >= least


def check_option(owner: str, name: str, value: Any, hint: Any) -> None:
    """OptionError unless `value`, the option `name` of `owner`, has the annotated type `hint`."""
    if not fits(value, hint):
        if isinstance(value, TracedNumber):
            float(value)  # raises TraceError, which says what to do
        raise OptionError(f"{owner}: {name} is {shown(value)}, expected {words_in_python(hint)}")


def split(hint: Any) -> tuple[Any, list[Any]]:
    """A type without `Annotated`, and its marks."""
    if get_origin(hint) is not Annotated:
        return hint, []
    return hint.__origin__, [part for mark in hint.__metadata__ for part in getattr(mark, "metadata", [mark])]


def bounds_of(base: Any, marks: list[Any]) -> Bounds:
    """The bounds of numbers of the type `base`, int or float. A later mark replaces the bound of its side."""
    low, high = _given(WIDEST[base], "ge", "gt"), _given(WIDEST[base], "le", "lt")
    for mark in marks:
        low, high = _given(mark, "ge", "gt") or low, _given(mark, "le", "lt") or high
    return Bounds(**low, **high)


def _given(mark: Any, *names: str) -> dict[str, Any]:
    return {name: bound for name in names if (bound := getattr(mark, name, None)) is not None}


def fits(value: Any, hint: Any) -> bool:
    """Whether `value` has the type `hint`. True for hints that are not classes, unions, literals or tuples."""
    base, marks = split(hint)
    if base is int:
        return is_integer(value, None) and bounds_of(base, marks).hold(value)
    if base is bool:
        return isinstance(value, (bool, np.bool_))
    if base is float:
        return not isinstance(value, bool) and isinstance(value, Real) and bounds_of(base, marks).hold(value)
    if base is str:
        patterns = [mark.pattern for mark in marks if isinstance(mark, Matches)]
        return isinstance(value, str) and all(re.search(pattern, value) for pattern in patterns)
    origin, inner = get_origin(base), get_args(base)
    if origin in (Union, UnionType):
        return any(fits(value, each) for each in inner)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if origin is tuple:
        if not isinstance(value, tuple) or any(isinstance(m, Items) and len(value) < m.least for m in marks):
            return False
        each = inner[:1] * len(value) if inner[1:] == (...,) else inner
        return len(value) == len(each) and all(map(fits, value, each))
    return isinstance(value, base) if isinstance(base, type) and origin is None and base is not Any else True


def is_option(hint: Any) -> bool:
    """Whether the type is one of options: of numbers, texts, true and false, choices, and tuples and unions of them."""
    base, marks = split(hint)
    if any(isinstance(mark, Expected) for mark in marks):
        return True
    if get_origin(base) in (tuple, Union, UnionType):
        return all(is_option(each) for each in get_args(base) if each is not ...)
    return base in NOUNS or base in OTHERS or get_origin(base) is Literal


def words(hint: Any) -> str:
    """The values of a type in a config, in words: "a number in [0, 1)"."""
    base, marks = split(hint)
    for mark in marks:
        if isinstance(mark, Expected):
            return mark.words
    if base in NOUNS:
        return f"{NOUNS[base][0]} in {bounds_of(base, marks).interval()}"
    origin, inner = get_origin(base), get_args(base)
    if origin in (Union, UnionType):
        return " or ".join(_list_of_them(each, inner) or words(each) for each in inner)
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}" if len(inner) > 1 else repr(inner[0])
    if origin is tuple:
        return f"a list of {_items(inner, marks)}"
    return OTHERS.get(base) or (f"a {base.__name__}" if isinstance(base, type) and origin is None else str(base))


def _list_of_them(hint: Any, members: tuple[Any, ...]) -> str | None:
    """A tuple of items of a type that is another member of the union, in words: "a list of 2 of them"."""
    base, _ = split(hint)
    items = get_args(base) if get_origin(base) is tuple else ()
    if not items or items[0] not in members or any(each not in (items[0], ...) for each in items):
        return None
    return "a list of them" if items[-1] is ... else f"a list of {len(items)} of them"


def _items(inner: tuple[Any, ...], marks: list[Any]) -> str:
    """The items of a tuple in words."""
    least = max((mark.least for mark in marks if isinstance(mark, Items)), default=0)
    number = f"{least} or more " if least else "" if inner[1:] == (...,) else f"{len(inner)} "
    base, bounds = split(inner[0])
    if base in NOUNS and all(each in (inner[0], ...) for each in inner):
        return f"{number}{NOUNS[base][1]} in {bounds_of(base, bounds).interval()}"
    return ", ".join(words(each) for each in inner if each is not ...)


def words_in_python(hint: Any) -> str:
    """`words` for a value in Python."""
    text = words(hint)
    for in_config, in_python in IN_PYTHON.items():
        text = text.replace(in_config, in_python)
    return text


def _text(bound: float) -> str:
    """A bound as text: "0.5", "2^31"."""
    fraction, exponent = frexp(abs(bound))
    if fraction == 0.5 and exponent > 16:
        return f"{'-' if bound < 0 else ''}2^{exponent - 1}"
    return f"{bound:g}".replace("e+", "e")


F = TypeVar("F", bound=Callable[..., Any])

Arguments = Mapping[str, Any]
"""Arguments of a constructor by name."""


class _Constructor(ABCMeta):
    """The metaclass of CheckedArguments. Its `__call__` constructs the objects."""

    @property
    def __signature__(cls) -> Signature:
        """The parameters of `__init__` without `self`, for `inspect.signature` and `help`."""
        return _signature(cls.__init__)  # type: ignore[misc]

    def __call__(cls, *args: Any, **options: Any) -> Any:
        try:
            arguments = cls.__signature__.bind(*args, **options).arguments
        except TypeError:
            raise OptionError(_advice(cls, args, options)) from None
        for name, hint in _types(cls).items():
            if name in arguments and cls.__signature__.parameters[name].kind is not Parameter.VAR_POSITIONAL:
                check_option(cls.kind(), name, arguments[name], hint)  # type: ignore[attr-defined]
        return super().__call__(*args, **options)


@cache
def _signature(method: Callable[..., None]) -> Signature:
    """The parameters of a method without `self`."""
    return Signature(list(inspect.signature(method).parameters.values())[1:])


class CheckedArguments(metaclass=_Constructor):
    """Dataclasses of options. Wrong arguments of the constructor are an OptionError that says how to write it.

    The options have the types of their annotations, with their bounds. A class that makes all options after the first
    keyword-only (`dataclasses.KW_ONLY`) cannot be given PyTorch's arguments in PyTorch's order by mistake.
    """

    tree_leaf: ClassVar[bool] = True
    """The fields are options and no arrays, so an instance is a leaf of a tree."""
    left_out: ClassVar[tuple[str, type, str] | None] = None
    """The first argument of PyTorch's class of this name where this class leaves it out: name, type and reason."""
    instead: ClassVar[Mapping[str, str]] = {}
    """What to write instead of attributes that PyTorch's class has."""

    @classmethod
    def kind(cls) -> str:
        """The name in a config."""
        return cls.__name__.lower()


def _missing(x: CheckedArguments, name: str) -> NoReturn:
    """Python calls this for missing attributes only. Raises AttributeError, with what to write instead."""
    advice = f"; {x.instead[name]}" if name in x.instead else ""
    raise AttributeError(f"{type(x).__name__} has no attribute {name!r}{advice}")


# Not in the class, where a type checker would accept every name for it.
CheckedArguments.__getattr__ = _missing  # type: ignore[attr-defined]


def checked_options(f: F, owner: str | None = None) -> F:
    """The function `f` with a check of its options by their annotations. Arrays among its arguments are not checked.

    A wrong option is an OptionError that begins with `owner`, by default the function's name.
    """
    names = list(inspect.signature(f).parameters)

    @cache
    def options() -> list[tuple[int, str, Any]]:
        hints = get_type_hints(f, include_extras=True)
        return [(i, name, hints[name]) for i, name in enumerate(names) if name in hints and is_option(hints[name])]

    @wraps(f)
    def checked(*args: Any, **named: Any) -> Any:
        for i, name, hint in options():
            if i < len(args) or name in named:
                check_option(owner or f.__name__, name, args[i] if i < len(args) else named[name], hint)
        return f(*args, **named)

    return cast(F, checked)


@cache
def _types(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)} if is_dataclass(cls) else {}


def _advice(cls: _Constructor, args: tuple[Any, ...], options: Arguments) -> str:
    """What is wrong with arguments that do not fit the constructor of ``cls``, and how to write it."""
    parameters = cls.__signature__.parameters
    for name in options:
        if name not in parameters:
            similar = "".join(f"; did you mean {known}?" for known in get_close_matches(name, parameters, 1))
            return f"{cls.__name__} has no option {name}{similar} (known: {', '.join(parameters) or 'none'})"
    first = [name for name, p in parameters.items() if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    takes = f"{cls.__name__} takes {' and '.join(first) + ' only' if first else 'no arguments'}"
    types = _types(cls)
    if cls.left_out is not None:  # type: ignore[attr-defined]
        left_out, kind, reason = cls.left_out  # type: ignore[attr-defined]
        in_pytorch = {left_out: kind, **{name: types.get(name, Any) for name in parameters if name != left_out}}
        if found := _in_order(cls, in_pytorch, args, options):
            return f"{takes}: {reason}. Write {_call(cls, first, {n: x for n, x in found.items() if n != left_out})}"
    if found := _in_order(cls, {name: types.get(name, Any) for name in parameters}, args, options):
        return f"{takes}: other options have names. Write {_call(cls, first, found)}"
    try:
        found = dict(cls.__signature__.bind_partial(*args, **options).arguments)
    except TypeError:
        return takes
    missing = [n for n, p in parameters.items() if p.default is p.empty and n not in found]
    return f"{cls.__name__} needs {' and '.join(missing)}. Write {_call(cls, first, {**found, **_places(missing)})}"


class _Place(str):
    """A name that stands for a value in the text of a call."""

    __repr__ = str.__str__


def _places(names: list[str]) -> dict[str, _Place]:
    return {name: _Place(name.upper()) for name in names}


def _in_order(
    cls: _Constructor, types: Mapping[str, Any], args: tuple[Any, ...], options: Arguments
) -> dict[str, Any] | None:
    """The arguments by name, if ``args`` are the first of ``types``, in this order; None if they do not fit."""
    known = cls.__signature__.parameters
    given = dict(zip(types, args, strict=False))
    found = {**given, **options}
    required = {name for name in types if name not in known or known[name].default is Parameter.empty}
    possible = 0 < len(args) <= len(types) and not given.keys() & options.keys() and found.keys() >= required
    return found if possible and all(fits(x, types[name]) for name, x in found.items()) else None


def _call(cls: type, first: list[str], arguments: Arguments) -> str:
    """The text of a call: ``nn.Conv2d(32, kernel_size=3)``."""
    package = cls.__module__.split(".")[1] + "." if cls.__module__.startswith("adtrain.") else ""
    texts = [shown(x) if name in first else f"{name}={shown(x)}" for name, x in arguments.items()]
    return f"{package}{cls.__name__}({', '.join(texts)})"
