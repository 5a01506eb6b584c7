"""Runs the plug-ins that a config names, before the config is checked: they define names that it uses.

Plug-ins of a run or a sweep are run only where the command line allows it: being in its folder is not enough.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from adtrain import plugins
from adtrain.config.problems import ConfigError, Problem, dotted, known
from adtrain.config.source import Node
from adtrain.plugins import PluginError

if TYPE_CHECKING:
    from adtrain.config.document import Plugin

Loader: TypeAlias = "Callable[[Plugin, Path], Plugin]"
"""Runs a plug-in of the config in this folder, and returns it with its SHA-256. Raises PluginError."""


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
    from adtrain.config.document import Plugin
    from adtrain.custom_ops import kernel_files

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
    if node is None or node.value is None:
        return None
    from pydantic import TypeAdapter, ValidationError

    from adtrain.config import explain
    from adtrain.config.document import Plugin

    try:
        named = TypeAdapter(list[Plugin]).validate_python(node.plain())
    except ValidationError as error:
        raise ConfigError(explain.problems(error, root, ("plugins",))) from None
    done: list[Plugin] = []
    for i, plugin in enumerate(named):
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


FOLDER = "plugins"
"""The folder, in that of a run or a sweep, with copies of its plug-ins and of the files that their kernels read."""


@dataclass(frozen=True)
class Trust:
    """What the command line says about the plug-ins of a run or a sweep.

    Attributes:
        files: the plug-ins to run instead of the folder's copies, found by their names.
        copies: whether the folder's copies may be run.
        changes: whether a plug-in may differ from that of the training.
    """

    files: Sequence[str] = ()
    copies: bool = False
    changes: bool = False

    def run(self, plugin: Plugin, folder: Path) -> Plugin:
        """Run a plug-in of the run or sweep in `folder`, and return it with its SHA-256. A `Loader`."""
        name = Path(plugin.file).name
        given = next((file for file in self.files if Path(file).name == name), None)
        if given is None and not self.copies:
            copy = f"the copy {folder / plugin.file}" if name.endswith(".py") else f"the installed {name}"
            raise PluginError(
                f"found {name}, which is code from {folder} and is not trusted; expected --plugin "
                f"{shlex.quote(name)} (the path of your file) to run that, or --trust-plugins to run {copy}"
            )
        found = plugins.find(plugin.file, folder) if given is None else plugins.find(given)
        if found.sha256 != plugin.sha256 and not self.changes:
            raise _changed(found.path, found.sha256, plugin.sha256)
        done = run(plugin.file, found)
        if (changed := changed_file(plugin, done)) is not None and not self.changes:
            name, before, now = changed
            raise _changed(found.path.parent / name, now, before)
        return done

    def check(self, named: Sequence[Plugin] | None) -> None:
        """Raise PluginError for a file that is none of the named plug-ins."""
        names = [Path(plugin.file).name for plugin in named or ()]
        for file in self.files:
            if Path(file).name not in names:
                raise PluginError(
                    f"--plugin {shlex.quote(file)}: found no plug-in of this name; {known(Path(file).name, names)}"
                )


def _changed(path: Path, now: str | None, before: str | None) -> PluginError:
    return PluginError(
        f"{path} has changed since the training: its SHA-256 is {now}, that of the training {before}; undo the change, "
        "or accept it with --override"
    )


NONE = Trust()
"""No plug-in may be run."""
