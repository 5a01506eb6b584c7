"""Arguments that a shell can complete: configs, runs, and names from tables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from adtrain.cli.options import FilePath


class ConfigName(click.ParamType):
    """A config as `config.load` takes it: the name of a packaged config, a YAML file, or the folder of a run."""

    name = "config"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from adtrain import config

        return [*_matching(config.packaged(), incomplete), *_runs(incomplete), CompletionItem(incomplete, type="file")]


class RunPath(FilePath):
    """The folder of a run."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [*_runs(incomplete), CompletionItem(incomplete, type="dir")]


class NameOf(click.ParamType):
    """One of `names`; with `separator`, several, received as a tuple. The command checks them."""

    name = "name"

    def __init__(self, names: Sequence[str], separator: str = "") -> None:
        self.names = list(dict.fromkeys(names))
        self.separator = separator

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not self.separator or not isinstance(value, str):
            return value
        return tuple(word.strip() for word in value.split(self.separator))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, separator, last = incomplete.rpartition(self.separator) if self.separator else ("", "", incomplete)
        return _matching([f"{before}{separator}{name}" for name in self.names], f"{before}{separator}{last}")


def _matching(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def _runs(incomplete: str) -> list[CompletionItem]:
    """The runs in the folder `runs`, and those in the folder that the incomplete word begins with."""
    folders = dict.fromkeys([Path("runs"), Path(os.path.dirname(incomplete))])
    found = sorted(
        str(file.parent) for folder in folders for name in ("config", "sweep") for file in folder.glob(f"*/{name}.yaml")
    )
    return _matching(found, incomplete)
