"""CheckedArguments: the base of classes that refuse wrong arguments of their constructors in one line."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from inspect import Parameter, Signature
from numbers import Real
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from adtrain.core.errors import AdtrainError, OptionError
from adtrain.core.options import is_integer, shown

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
        try:
            made = super().__call__(*args, **options)
        except AdtrainError:
            raise
        except Exception:
            _check_types(cls, arguments)  # the cause may be an option of a wrong type
            raise
        _check_types(cls, arguments)
        return made


@cache
def _signature(method: Callable[..., None]) -> Signature:
    """The parameters of a method without `self`."""
    return Signature(list(inspect.signature(method).parameters.values())[1:])


class CheckedArguments(metaclass=_Constructor):
    """Dataclasses of options. Wrong arguments of the constructor are an OptionError that says how to write it.

    The options have the types of their annotations. A class that makes all options after the first keyword-only
    (`dataclasses.KW_ONLY`) cannot be given PyTorch's arguments in PyTorch's order by mistake.
    """

    tree_leaf: ClassVar[bool] = True
    """The fields are options and no arrays, so an instance is a leaf of a tree."""
    left_out: ClassVar[tuple[str, type, str] | None] = None
    """The first argument of PyTorch's class of this name where this class leaves it out: name, type and reason."""
    instead: ClassVar[Mapping[str, str]] = {}
    """What to write instead of attributes that PyTorch's class has."""


def _missing(x: CheckedArguments, name: str) -> NoReturn:
    """Python calls this for missing attributes only. Raises AttributeError, with what to write instead."""
    advice = f"; {x.instead[name]}" if name in x.instead else ""
    raise AttributeError(f"{type(x).__name__} has no attribute {name!r}{advice}")


# Not in the class, where a type checker would accept every name for it.
CheckedArguments.__getattr__ = _missing  # type: ignore[attr-defined]


def _check_types(cls: type, arguments: Arguments) -> None:
    """OptionError unless the arguments have the types that the fields of the dataclass ``cls`` are annotated with."""
    for name, hint in _types(cls).items():
        if name in arguments and not _has_type(arguments[name], hint):
            kind: str = cls.kind()  # type: ignore[attr-defined]
            raise OptionError(f"{kind}: {name} is {shown(arguments[name])}, expected {_expected(hint)}")


@cache
def _types(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)} if is_dataclass(cls) else {}


_NUMBERS = {bool: "True or False", int: "an integer", float: "a number", str: "a string", NoneType: "None"}


def _has_type(value: Any, hint: Any) -> bool:
    """Whether ``value`` has the type ``hint``; True for hints that are not classes, unions, literals or tuples."""
    if hint is int:
        return is_integer(value, least=None)
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_has_type(value, each) for each in inner)
    if origin is Literal:
        return value in inner
    if origin is tuple:
        each = inner[:1] * len(value) if isinstance(value, tuple) and inner[1:] == (...,) else inner
        return isinstance(value, tuple) and len(value) == len(each) and all(map(_has_type, value, each))
    return isinstance(value, hint) if isinstance(hint, type) and origin is None and hint is not Any else True


def _expected(hint: Any) -> str:
    """The values of type ``hint`` in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_expected, inner))
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    return _NUMBERS.get(hint) or (f"a {hint.__name__}" if isinstance(hint, type) and origin is None else str(hint))


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
    fits = 0 < len(args) <= len(types) and not given.keys() & options.keys() and found.keys() >= required
    return found if fits and all(_has_type(x, types[name]) for name, x in found.items()) else None


def _call(cls: type, first: list[str], arguments: Arguments) -> str:
    """The text of a call: ``nn.Conv2d(32, kernel_size=3)``."""
    package = cls.__module__.split(".")[1] + "." if cls.__module__.startswith("adtrain.") else ""
    texts = [shown(x) if name in first else f"{name}={shown(x)}" for name, x in arguments.items()]
    return f"{package}{cls.__name__}({', '.join(texts)})"
