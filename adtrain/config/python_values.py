"""Values that Python code gives in place of YAML text: a whole config as a dict, or overrides."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from adtrain.config.problems import ConfigError, PathParts, Problem, dotted, found
from adtrain.config.source import MAX_DEPTH, Node


def of_python(value: Any, where: str, path: PathParts = ()) -> Node:
    """A value as nodes, as if it were read from a file; every node has the position `where`.

    Takes None, bools, numbers (also NumPy's), strings, paths, lists, tuples and mappings with strings as keys. A Node
    stays as it is, with its own position.
    Raises ConfigError for anything else; `path` is the key of the value, for the message.
    """
    if isinstance(value, Node):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise _error(where, path, f"found {found(value)}, expected text in UTF-8")
    if value is None or isinstance(value, (bool, int, float, str)):
        return Node(where, value)
    if len(path) > MAX_DEPTH:
        raise _error(where, path[:4], f"found more than {MAX_DEPTH} levels, expected fewer")
    if isinstance(value, (list, tuple)):
        return Node(where, [of_python(item, where, (*path, i)) for i, item in enumerate(value)])
    if not isinstance(value, Mapping):
        kind = type(value).__name__
        raise _error(where, path, f"found an object of type {kind}, expected a number, string, list or mapping")
    for key in value:
        if not isinstance(key, str):
            raise _error(where, path, f"found the key {found(key)}, expected a string")
    children = {key: of_python(item, where, (*path, key)) for key, item in value.items()}
    return Node(where, children, dict.fromkeys(children, where))


def _error(where: str, path: PathParts, message: str) -> ConfigError:
    return ConfigError([Problem(where, dotted(path), message)])
