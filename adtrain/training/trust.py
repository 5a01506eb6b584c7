"""Which plug-ins of a run or a sweep may be run. The command line decides; being in its folder is not enough."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from adtrain import plugins
from adtrain.config import plugged
from adtrain.config.document import Plugin
from adtrain.config.problems import known
from adtrain.plugins import PluginError

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
        """Run a plug-in of the run or sweep in `folder`, and return it with its SHA-256. A `config.plugged.Loader`."""
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
        done = plugged.run(plugin.file, found)
        if (changed := plugged.changed_file(plugin, done)) is not None and not self.changes:
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
