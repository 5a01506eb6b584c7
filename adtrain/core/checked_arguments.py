"""Checks of options by their annotations: of classes (CheckedArguments) and of functions (`checked_options`)."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache, wraps
from inspect import Parameter, Signature
from typing import Any, ClassVar, NoReturn, TypeVar, cast, get_type_hints

from adtrain.core.errors import OptionError
from adtrain.core.options import check_option, fits, is_option, shown

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
