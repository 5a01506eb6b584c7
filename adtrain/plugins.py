"""Plug-ins: Python files of the user, run because a config or the command line names them."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from adtrain.core.errors import AdtrainError

_loaded: set[Path] = set()


class PluginError(AdtrainError):
    """A plug-in cannot be read or run. The message names its file and line."""


def load(paths: Iterable[str | Path]) -> None:
    """Run plug-ins, each once in a process.

    Raises:
        PluginError: a file is missing, is no Python, or raises an error.
    """
    for path in map(Path, paths):
        resolved = path.resolve()
        if resolved in _loaded:
            continue
        if not resolved.is_file():
            raise PluginError(f"{path}: there is no such plug-in; expected a Python file")
        name = f"adtrain_plugin_{resolved.stem}"
        spec = importlib.util.spec_from_file_location(name, resolved)
        if spec is None or spec.loader is None:
            raise PluginError(f"{path}: is no Python file; a plug-in's name ends in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except SyntaxError as error:
            raise PluginError(f"{error.filename or path}:{error.lineno}: {error.msg}") from error
        except Exception as error:
            raise PluginError(f"{_place(error, resolved)}: {type(error).__name__}: {error}") from error
        _loaded.add(resolved)


def _place(error: Exception, file: Path) -> str:
    """File and line of the plug-in where the error was raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
    return f"{file}:{lines[-1]}" if lines else str(file)
