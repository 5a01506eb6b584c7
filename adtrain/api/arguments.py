"""Checks of arguments that have a wrong type."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from adtrain.core.errors import AdtrainError


def check_type(given: Any, kinds: type | tuple[type, ...], what: str, expected: str) -> None:
    """Raise AdtrainError unless `given` is one of `kinds`; `what` is the argument, `expected` says what it can be."""
    if not isinstance(given, kinds):
        raise AdtrainError(f"{what}: found an object of type {type(given).__name__}, expected {expected}")


def as_path(given: Any, what: str) -> Path:
    """The path in an argument. Raises AdtrainError for another type, and for the empty path, which would be "."."""
    check_type(given, (str, os.PathLike), what, "a path")
    if not os.fspath(given):
        raise AdtrainError(f"{what}: found an empty path")
    return Path(given)
