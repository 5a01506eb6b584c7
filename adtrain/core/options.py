"""Checks of the options of layers, optimizers and schedules."""

from __future__ import annotations

from math import inf, isfinite, nan
from numbers import Integral, Real
from typing import Any

from adtrain.core.errors import OptionError


def is_integer(value: Any, least: int) -> bool:
    """Whether `value` is an integer of at least `least`, and not a bool."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def check_integer(owner: str, name: str, value: Any, least: int) -> None:
    """OptionError unless `value`, the option `name` of `owner`, is an integer of at least `least`."""
    if not is_integer(value, least):
        raise OptionError(f"{owner}: {name} is {value!r}, expected an integer, at least {least}")


def check_number(owner: str, name: str, value: Any, low: float = 0, below: float = inf) -> None:
    """OptionError unless `value`, the option `name` of `owner`, is a finite number in [low, below)."""
    number = float(value) if not isinstance(value, bool) and isinstance(value, Real) else nan
    if not isfinite(number) or not low <= number < below:
        expected = (
            "a finite number"
            + (f", at least {low}" if low > -inf else "")
            + (f", below {below}" if below < inf else "")
        )
        raise OptionError(f"{owner}: {name} is {value!r}, expected {expected}")
