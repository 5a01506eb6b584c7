"""Docstrings as texts for users, in help and the JSON Schema. Python -OO strips them from the compiled code."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from adtrain.files import read_regular

STRIPPED = sys.flags.optimize >= 2
"""Whether classes and functions have lost their docstrings, which are then read from their files."""


def of(target: type | Callable[..., Any]) -> str | None:
    """The docstring of a class or function, or of the first base class that has one; None without one."""
    if not STRIPPED:
        return inspect.getdoc(target)
    for each in target.__mro__[:-1] if isinstance(target, type) else (inspect.unwrap(target),):
        file = getattr(sys.modules.get(each.__module__), "__file__", None)
        found = _in_file(file).get(each.__qualname__) if file is not None else None
        if found is not None:
            return found
    return None if isinstance(target, type) else inspect.getdoc(target)  # a function's may have been set


def attributes(target: type) -> dict[str, str]:
    """What the sections `Attributes:` in the docstrings of a class and of its bases say of each attribute.

    Such a section ends a docstring. It has a line `name: text` for each attribute; further lines are indented.
    """
    found: dict[str, str] = {}
    for each in reversed(target.__mro__[:-1]):
        name = ""
        for line in (of(each) or "").partition("Attributes:\n")[2].splitlines():
            if line.startswith(" " * 8):
                found[name] += f" {line.strip()}"
            else:
                name, _, text = line.strip().partition(": ")
                found[name] = text
    return found


@cache
def _in_file(path: str) -> dict[str, str]:
    """The docstrings in a Python file, by the qualified names of its classes and functions."""
    try:
        return dict(_below(ast.parse(read_regular(path)), ""))
    except (OSError, SyntaxError):  # an extension, or a file that is no longer there
        return {}


def _below(parent: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            name = f"{prefix}{node.name}"
            if (text := ast.get_docstring(node)) is not None:
                yield name, text
            yield from _below(node, f"{name}." if isinstance(node, ast.ClassDef) else f"{name}.<locals>.")
        else:
            yield from _below(node, prefix)
