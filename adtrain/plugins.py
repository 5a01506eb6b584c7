"""Plug-ins: Python code of the user, run because a config or the command line names it.

A name that ends in .py is a file. Another name is that of an installed package's entry point in the group
`adtrain.plugins`. Finding a plug-in reads its text; only `Plugin.run` runs it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from adtrain.core.errors import PACKAGE, AdtrainError, one_line

F = TypeVar("F", bound=Callable[..., Any])

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
        return _digest(self.text)

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
    return _place(error, {str(plugin.path) for plugin, _ in _loaded.values()})


def named(error: BaseException) -> PluginError | None:
    """What a plug-in has raised, as an error that names its line; None for an error of adtrain.

    A plug-in can raise anything: SystemExit and KeyboardInterrupt, which would end the command without a word, and
    errors such as EOFError and BrokenPipeError, which have another meaning for a command.
    """
    where = place(error)
    return None if where is None or _is_of_adtrain(error) else PluginError(f"{where}: {_reason(error)}")


@contextmanager
def named_errors() -> Iterator[None]:
    """Raise the errors of a block as `named` gives them."""
    try:
        yield
    except BaseException as error:
        found = named(error)
        if found is None:
            raise
        raise found from error


def watched(function: F, what: str) -> F:
    """A function of a plug-in, which raises PluginError if it closes standard output or standard error.

    The next file that is opened would get the descriptor, and all that libraries print.

    Args:
        what: the function in an error, with the line that defines it.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        before = _standard_files()
        found = function(*args, **options)
        _require_open(before, what)
        return found

    return call  # type: ignore[return-value]


def _place(error: BaseException | None, files: Collection[str]) -> str | None:
    """`file:line` of the innermost line in one of the files that raised the error or one of its causes."""
    while error is not None:
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if frame.filename in files:
                return f"{frame.filename}:{frame.lineno}"
        # A StopIteration that leaves a generator is the cause of a RuntimeError without its lines.
        error = None if isinstance(error, AdtrainError) else error.__cause__
    return None


def _is_of_adtrain(error: BaseException) -> bool:
    """Whether adtrain raised the error, while a plug-in ran: one of its own classes, or the end that a signal asks."""
    if isinstance(error, AdtrainError):
        return type(error).__module__.startswith("adtrain.") and one_line(error) is not None
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    return isinstance(error, SystemExit | KeyboardInterrupt) and innermost.startswith(PACKAGE + os.sep)


def _reason(error: BaseException) -> str:
    """The class and the text of an error."""
    text = one_line(error)
    return f"{type(error).__name__}: {'its text cannot be shown' if text is None else text}".removesuffix(": ")


def _standard_files() -> list[tuple[int, int] | None]:
    """Device and inode of the files that are standard output and standard error; None for one that is closed."""
    found: list[tuple[int, int] | None] = []
    for descriptor in (1, 2):
        try:
            status = os.fstat(descriptor)
        except OSError:
            found.append(None)
        else:
            found.append((status.st_dev, status.st_ino))
    return found


def _require_open(before: list[tuple[int, int] | None], what: str) -> None:
    for descriptor, old, new in zip((1, 2), before, _standard_files(), strict=True):
        if old is not None and old != new:
            name = "standard output" if descriptor == 1 else "standard error"
            raise PluginError(f"{what} has closed descriptor {descriptor}, {name}; keep it open")


def _installed(name: str) -> tuple[Path, str]:
    """File and name of the module of an installed plug-in."""
    from importlib.metadata import entry_points  # takes longer to import than the rest of this module

    entries = {entry.name: entry.module for entry in entry_points(group=GROUP)}
    try:
        spec = importlib.util.find_spec(entries[name]) if name in entries else None
    except BaseException as error:  # the package around the module runs
        if _is_of_adtrain(error):
            raise
        raise PluginError(f"{name}: the installed plug-in cannot be found: {_reason(error)}") from None
    if spec is None or spec.origin is None:
        listed = ", ".join(sorted(entries)) or "none"
        raise PluginError(
            f"{name}: found neither a name that ends in .py nor an installed plug-in; installed: {listed}"
        )
    return Path(spec.origin), entries[name]


def _digest(content: bytes) -> str:
    from hashlib import sha256  # slow to import, and most configs have no plug-ins

    return sha256(content).hexdigest()


def _run(plugin: Plugin) -> ModuleType:
    version = _digest(str(plugin.path).encode() + plugin.text)[:12]
    name = plugin.module or f"{MODULE}{plugin.path.stem}_{version}"
    before = _standard_files()
    try:
        if plugin.module is not None:
            module = importlib.import_module(plugin.module)
        else:
            module = ModuleType(name)
            module.__file__ = str(plugin.path)
            sys.modules[name] = module
            exec(compile(plugin.text, str(plugin.path), "exec", dont_inherit=True), vars(module))
    except SyntaxError as error:
        raise PluginError(f"{error.filename or plugin.path}:{error.lineno or 1}: {error.msg}") from error
    except PluginError:
        raise
    except BaseException as error:
        if not isinstance(error, AdtrainError) and _is_of_adtrain(error):
            raise
        where = _place(error, {str(plugin.path)}) or str(plugin.path)
        raise PluginError(f"{where}: {one_line(error) if _is_of_adtrain(error) else _reason(error)}") from error
    _require_open(before, f"{plugin.path}:1: the plug-in")
    return module
