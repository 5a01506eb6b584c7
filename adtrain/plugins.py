"""Plug-ins: Python files of the user, run because a config or the command line names them."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from adtrain.core.errors import AdtrainError

_loaded: dict[Path, ModuleType] = {}


class PluginError(AdtrainError):
    """A plug-in cannot be read or run. The message names its file and line."""


def load(paths: Iterable[str | Path]) -> list[ModuleType]:
    """Run plug-ins, each once in a process, and return their modules.

    Raises:
        PluginError: a file is missing, is no Python, or raises an error.
    """
    return [_module(Path(path)) for path in paths]


def _module(path: Path) -> ModuleType:
    file = path.resolve()
    if file in _loaded:
        return _loaded[file]
    if not file.is_file():
        raise PluginError(f"{path}: there is no such plug-in; expected a Python file")
    name = f"adtrain_plugin_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise PluginError(f"{path}: is no Python file; a plug-in's name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise PluginError(f"{error.filename or path}:{error.lineno}: {error.msg}") from error
    except Exception as error:
        raise PluginError(f"{_place(error, file)}: {type(error).__name__}: {error}") from error
    _loaded[file] = module
    return module


def _place(error: Exception, file: Path) -> str:
    """File and line of the plug-in where the error was raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
    return f"{file}:{lines[-1]}" if lines else str(file)
