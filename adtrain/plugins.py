"""Plug-ins: Python code of the user, run because a config or the command line names it.

A name that ends in .py is a file. Another name is that of an installed package's entry point in the group
`adtrain.plugins`. Finding a plug-in reads its text; only `Plugin.run` runs it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from adtrain.core.errors import AdtrainError

GROUP = "adtrain.plugins"
MODULE = "adtrain_plugin_"
"""How the name of the module of a plug-in's file begins."""

_loaded: dict[str, tuple[Plugin, ModuleType]] = {}
"""The plug-in of each name that was run last. It has replaced what an earlier one had registered."""


class PluginError(AdtrainError):
    """A plug-in cannot be read or run. The message names its file and line."""


@dataclass(frozen=True)
class Plugin:
    """The text of a plug-in.

    Attributes:
        name: the file's name, or the entry point's.
        path: the absolute path of the file.
        module: the installed module; None for a file.
    """

    name: str
    path: Path
    text: bytes = field(repr=False)
    module: str | None = None

    @property
    def sha256(self) -> str:
        return sha256(self.text).hexdigest()

    def run(self) -> ModuleType:
        """Run the plug-in, unless it is the last one of its name that was run, and return its module.

        Raises:
            PluginError: the text is no Python, or raises an error.
        """
        before, module = _loaded.get(self.name, (None, None))
        if before != self or module is None:
            _loaded[self.name] = self, _run(self)
        return _loaded[self.name][1]


def find(name: str, folder: Path = Path()) -> Plugin:
    """Read the plug-in of this name without running it; the paths of files begin in `folder`.

    Raises:
        PluginError: there is no such file or installed plug-in, or the file cannot be read.
    """
    if name.endswith(".py"):
        path, module = folder / Path(name).expanduser(), None
    else:
        path, module = _installed(name)
    if path.exists() and not (path.is_file() or path.is_dir()):  # reading a pipe would wait for a writer
        raise PluginError(f"{path}: is not a regular file; expected a Python file")
    try:
        text = path.read_bytes()
    except OSError as error:
        if path.exists():
            raise PluginError(f"{path}: cannot be read ({error.strerror})") from None
        raise PluginError(f"{path}: found nothing, expected a Python file") from None
    return Plugin(name if module else path.name, path.resolve(), text, module)


def loaded(digest: str) -> Plugin:
    """The plug-in with this SHA-256, which has been run."""
    return next(plugin for plugin, _ in _loaded.values() if plugin.sha256 == digest)


def place(error: BaseException) -> str | None:
    """`file:line` of the innermost line of a plug-in that raised the error; None if no plug-in was running."""
    files = {str(plugin.path) for plugin, _ in _loaded.values()}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in files:
            return f"{frame.filename}:{frame.lineno}"
    return None


def _installed(name: str) -> tuple[Path, str]:
    """File and name of the module of an installed plug-in."""
    from importlib.metadata import entry_points  # takes longer to import than the rest of this module

    entries = {entry.name: entry.module for entry in entry_points(group=GROUP)}
    try:
        spec = importlib.util.find_spec(entries[name]) if name in entries else None
    except ImportError as error:
        raise PluginError(f"{name}: the installed plug-in cannot be found: {error}") from None
    if spec is None or spec.origin is None:
        listed = ", ".join(sorted(entries)) or "none"
        raise PluginError(
            f"{name}: found neither a name that ends in .py nor an installed plug-in; installed: {listed}"
        )
    return Path(spec.origin), entries[name]


def _run(plugin: Plugin) -> ModuleType:
    version = sha256(str(plugin.path).encode() + plugin.text).hexdigest()[:12]
    name = plugin.module or f"{MODULE}{plugin.path.stem}_{version}"
    try:
        if plugin.module is not None:
            return importlib.import_module(plugin.module)
        module = ModuleType(name)
        module.__file__ = str(plugin.path)
        sys.modules[name] = module
        exec(compile(plugin.text, str(plugin.path), "exec", dont_inherit=True), vars(module))
    except SyntaxError as error:
        raise PluginError(f"{error.filename or plugin.path}:{error.lineno or 1}: {error.msg}") from error
    except PluginError:
        raise
    except (Exception, SystemExit) as error:
        lines = [x.lineno for x in traceback.extract_tb(error.__traceback__) if x.filename == str(plugin.path)]
        where = f"{plugin.path}:{lines[-1]}" if lines else str(plugin.path)
        reason = " ".join(str(error).split())
        kind = "" if isinstance(error, AdtrainError) else f"{type(error).__name__}: "
        raise PluginError(f"{where}: {kind}{reason}") from error
    return module
