"""Runs the plug-ins that a config names, before the config is checked: they define names that it uses."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

from pydantic import TypeAdapter, ValidationError

from adtrain import plugins
from adtrain.config import explain
from adtrain.config.document import Plugin
from adtrain.config.problems import ConfigError, Problem, dotted
from adtrain.config.source import Node
from adtrain.custom_ops import kernel_files
from adtrain.plugins import PluginError

Loader: TypeAlias = Callable[[Plugin, Path], Plugin]
"""Runs a plug-in of the config in this folder, and returns it with its SHA-256. Raises PluginError."""

_entries: TypeAdapter[list[Plugin] | None] = TypeAdapter(list[Plugin] | None)


def run_named(plugin: Plugin, folder: Path) -> Plugin:
    """Run a plug-in because the user's config names it. A `Loader`."""
    found = plugins.find(plugin.file, folder)
    if plugin.sha256 not in (None, found.sha256):
        raise PluginError(f"{found.path}: found the SHA-256 {found.sha256}, expected {plugin.sha256}")
    done = run(plugin.file, found)
    if plugin.files is not None and (changed := changed_file(plugin, done)):
        name, before, now = changed
        raise PluginError(f"{found.path.parent / name}: found the SHA-256 {now}, expected {before}")
    return done


def run(file: str, found: plugins.Plugin) -> Plugin:
    """Run a plug-in, and return it as `file` with the SHA-256 of its file and of those that its kernels read.

    Raises PluginError for a file of a kernel outside the plug-in's folder, because a run stores copies.
    """
    module, folder = found.run(), found.path.parent
    hashes: dict[str, str] = {}
    for path in kernel_files(module.__name__) if found.module is None else ():
        if not path.is_relative_to(folder):
            raise PluginError(f"{path}: expected a file in {folder}, the folder of {found.name}, as a run stores both")
        hashes[path.relative_to(folder).as_posix()] = sha256(path.read_bytes()).hexdigest()
    return Plugin(file=file, sha256=found.sha256, files=hashes or None)


def changed_file(before: Plugin, now: Plugin) -> tuple[str, str, str] | None:
    """The first file of a kernel that differs in the two plug-ins, and its SHA-256 in both; None if they are equal."""
    for name in sorted({*(before.files or ()), *(now.files or ())}):
        old, new = ((plugin.files or {}).get(name, "none (no kernel reads it)") for plugin in (before, now))
        if old != new:
            return name, old, new
    return None


def refuse(plugin: Plugin, folder: Path) -> Plugin:
    """Raise PluginError, because only the folder of a run names the plug-in. A `Loader`."""
    name = Path(plugin.file).name
    reason = f"found {name}, which is code from {folder} and is not trusted"
    raise PluginError(f"{reason}; give {folder}/config.yaml to run it")


def keep(plugin: Plugin, folder: Path) -> Plugin:
    """The plug-in as it is, for a config whose plug-ins have been run. A `Loader`."""
    return plugin


def run_all(root: Node, folder: Path, load: Loader) -> list[Plugin] | None:
    """Run the plug-ins of a config in their order, and return them with their hashes; None if it names none.

    Raises ConfigError with the position of the plug-in that cannot be run.
    """
    node = root.value.get("plugins") if isinstance(root.value, dict) else None
    try:
        named = _entries.validate_python(None if node is None else node.plain())
    except ValidationError as error:
        raise ConfigError(explain.problems(error, root, ("plugins",))) from None
    done: list[Plugin] = []
    for i, plugin in enumerate(named or ()):
        path = ("plugins", i)
        try:
            if Path(plugin.file).name in [Path(other.file).name for other in done]:
                raise PluginError(f"found a second plug-in {Path(plugin.file).name}, expected another name for one")
            done.append(load(plugin, folder))
            taken: dict[str, str] = {}
            for name, digest in [item for each in done for item in (each.files or {}).items()]:
                if taken.setdefault(name, digest) != digest:
                    raise PluginError(f"found a second file {name} of a kernel, expected another name for one")
        except PluginError as error:
            raise ConfigError([Problem(root.find(path)[1], dotted(path), str(error))]) from error
    return done or None


def with_files(root: Node, files: Sequence[str]) -> Node:
    """The config with the plug-ins that the command line names after its own."""
    if not files or not isinstance(root.value, dict):
        return root
    node = root.value.get("plugins", Node("--plugin", []))
    own = list(node.value) if isinstance(node.value, list) else [] if node.value is None else [node]
    known = {item.value for item in own}
    texts = {name: str(Path(name).expanduser().absolute()) if name.endswith(".py") else name for name in files}
    own += [Node(f"--plugin {shlex.quote(name)}", text) for name, text in texts.items() if not {name, text} & known]
    value = {**root.value, "plugins": Node(node.where, own)}
    return Node(root.where, value, {**root.key_where, "plugins": node.where})
