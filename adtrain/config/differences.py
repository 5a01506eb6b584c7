"""The differences of configs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from adtrain.config.problems import PathParts, dotted


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
