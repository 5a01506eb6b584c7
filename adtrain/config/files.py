"""Load configs from files, and dump them as YAML."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from adtrain.assets import asset_path
from adtrain.config import build, explain, source
from adtrain.config.document import Config, Data, Source
from adtrain.config.overrides import Overrides, override
from adtrain.config.problems import ConfigError, Problem, known
from adtrain.config.python_values import of_python
from adtrain.config.source import Node
from adtrain.files import open_regular


def load(path_or_name: str | os.PathLike[str], overrides: Overrides = ()) -> Config:
    """Load a YAML file, or the packaged config of that name (`mlp`), and apply overrides: `key=value`, or a mapping.

    A file is preferred to a packaged config of the same name. Keys, values and the shape of every layer are checked.
    Raises ConfigError that lists every problem.
    """
    path = _find(os.fspath(path_or_name))
    try:
        with open_regular(path) as file:
            content = file.read(source.MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError([Problem(str(path), "", f"cannot be read: {error.strerror}")]) from None
    return parse(content, path, overrides)


def parse(content: bytes, path: Path, overrides: Overrides = ()) -> Config:
    """The config in the bytes of a YAML file; `path` is used in messages. Raises ConfigError as `load` does."""
    root, problems = source.read(content, str(path))
    return _checked(root, path, overrides, problems)


def from_values(values: Mapping[str, Any], overrides: Overrides = ()) -> Config:
    """The config in a mapping with the structure of a YAML file. Raises ConfigError as `load` does."""
    return _checked(of_python(values, "config"), None, overrides, [])


def _checked(root: Node, path: Path | None, overrides: Overrides, problems: list[Problem]) -> Config:
    root = override(root, overrides)
    try:
        cfg = Config.model_validate(root.plain())
    except ValidationError as error:
        raise ConfigError([*problems, *explain.problems(error, root)]) from None
    cfg._source = Source(path, root)
    problems += build.check(cfg)
    if problems:
        raise ConfigError(problems)
    return cfg


def load_data(values: Mapping[str, str], overrides: Sequence[str] = ()) -> Data:
    """A data section with the keys `values` (`dataset` or `path`) and with `key=value` overrides of its keys.

    Raises ConfigError that lists every problem.
    """
    section = {name: Node("data", value) for name, value in values.items()} | {"batch_size": Node("data", 1)}
    root = Node("data", {"data": Node("data", section, dict.fromkeys(section, "data"))}, {"data": "data"})
    root = override(root, [f"data.{setting}" for setting in overrides])
    try:
        return Data.model_validate(root.find(("data",))[0].plain())
    except ValidationError as error:
        raise ConfigError(explain.problems(error, root, ("data",))) from None


def dump(cfg: Config) -> str:
    """The config as YAML, with all defaults; loading it gives an equal config."""
    values = cfg.model_dump(mode="json", exclude_none=True)
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)


def packaged() -> list[str]:
    """The names of the configs that come with adtrain."""
    return sorted(path.stem for path in asset_path("configs").glob("*.yaml"))


def _find(name: str) -> Path:
    if os.path.exists(name) and not os.path.isdir(name):
        return Path(name)
    names = packaged()
    if name in names:
        return asset_path("configs") / f"{name}.yaml"
    if os.path.isdir(name):
        raise ConfigError([Problem(name, "", "found a folder, expected a YAML file")])
    message = f"neither a file nor a packaged config; {known(Path(name).stem, names, 'packaged')}"
    raise ConfigError([Problem(name or "''", "", message)])


class _Dumper(yaml.SafeDumper):
    """Quotes strings that `source` would read as numbers. PyYAML reads some of them, such as 1e3, as strings."""


_Dumper.add_implicit_resolver(f"{source.TAG}int", source.INTEGER, list("-+0123456789"))
_Dumper.add_implicit_resolver(f"{source.TAG}float", source.FLOAT, list("-+.0123456789"))
