"""Checks of the options of layers, optimizers and schedules, and of arguments that are functions."""

from __future__ import annotations

from math import inf, isfinite, nan
from numbers import Integral, Real
from typing import Any

from adtrain.core.errors import OptionError


def shown(value: Any) -> str:
    """`value` in an error: its repr, or its type if that is long, has several lines or cannot be made."""
    try:
        text = repr(value)
    except Exception:  # of the user's class, or of Python for an integer of more than 4300 digits
        text = "\n"
    return text if len(text) <= 80 and "\n" not in text else f"a {type(value).__name__}"


def require_function(name: str, f: Any) -> None:
    """Raise OptionError if `f`, the argument of the function `name`, is not a function."""
    if not callable(f):
        raise OptionError(f"{name}: found {shown(f)}, expected a function")


def is_integer(value: Any, least: int | None) -> bool:
    """Whether `value` is an integer, of at least `least` if that is given, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return least is None or int(value) >= least


def check_integer(owner: str, name: str, value: Any, least: int) -> None:
    """OptionError unless `value`, the option `name` of `owner`, is an integer of at least `least`."""
    if not is_integer(value, least):
        raise OptionError(f"{owner}: {name} is {shown(value)}, expected an integer, at least {least}")


def check_number(owner: str, name: str, value: Any, low: float = 0, below: float = inf) -> None:
    """OptionError unless `value`, the option `name` of `owner`, is a finite number in [low, below)."""
    number = float(value) if not isinstance(value, bool) and isinstance(value, Real) else nan
    if not isfinite(number) or not low <= number < below:
        expected = (
            "a finite number"
            + (f", at least {low}" if low > -inf else "")
            + (f", below {below}" if below < inf else "")
        )
        raise OptionError(f"{owner}: {name} is {shown(value)}, expected {expected}")
