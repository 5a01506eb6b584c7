"""Load configs from files, and dump them as YAML."""

from __future__ import annotations

import copyreg
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

from adtrain.config import mistakes, plugged, schema, source
from adtrain.config.names import RUN_CONFIG, find_config
from adtrain.config.overrides import Overrides, override, with_nodes, without
from adtrain.config.problems import ConfigError, Problem
from adtrain.config.source import Node, of_python
from adtrain.files import open_regular

if TYPE_CHECKING:
    from adtrain.config.document import Config, Data

_log = logging.getLogger(__name__)


def load(
    path_or_name: str | os.PathLike[str],
    overrides: Overrides = (),
    plugins: Sequence[str] = (),
    run_plugin: plugged.Loader = plugged.run_named,
) -> Config:
    """Load a YAML file, the packaged config of that name (`mlp`), or the config of the run in a folder, and apply
    overrides: `key=value`, or a mapping.

    A file is preferred to a packaged config of the same name, and this to a folder. Keys, values and the shape of every
    layer are checked. First the plug-ins that the config names are run, then the further ones in `plugins`, each by
    `run_plugin`. The plug-ins of a run that is named by its folder are refused.
    Raises ConfigError that lists every problem.
    """
    path = find_config(os.fspath(path_or_name))
    if path.is_dir():
        path, run_plugin = path / RUN_CONFIG, plugged.refuse
    return parse(_read(path), path, overrides, plugins, run_plugin)


def plain(path: Path) -> dict[str, Any]:
    """The keys and values of a YAML file as they are. Raises ConfigError where it is not a mapping."""
    root, problems = source.read(_read(path), str(path))
    if problems:
        raise ConfigError(problems)
    return cast(dict[str, Any], root.plain())


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(source.MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError([Problem(str(path), "", f"cannot be read: {error.strerror}")]) from None


def parse(
    content: bytes,
    path: Path,
    overrides: Overrides = (),
    plugins: Sequence[str] = (),
    run_plugin: plugged.Loader = plugged.run_named,
) -> Config:
    """The config in the bytes of the YAML file `path`. Further arguments and ConfigError are those of `load`."""
    root, problems = source.read(content, str(path))
    return _checked(root, path, overrides, problems, plugins, run_plugin)


def from_values(values: Mapping[str, Any], overrides: Overrides = ()) -> Config:
    """The config in a mapping with the structure of a YAML file. Raises ConfigError as `load` does."""
    return _checked(of_python(values, "config"), None, overrides, [], (), plugged.run_named)


def _pickled(cfg: Config) -> tuple[Callable[..., Config], tuple[dict[str, Any]]]:
    """How a Config is pickled: by its values, as the classes of layers and losses are made when they are registered."""
    return from_values, (cfg.model_dump(mode="json", exclude_none=True),)


def _checked(
    root: Node,
    path: Path | None,
    overrides: Overrides,
    problems: list[Problem],
    plugins: Sequence[str],
    run_plugin: plugged.Loader,
) -> Config:
    naming = plugged.with_files(override(root, _of_plugins(overrides)), plugins)
    named = plugged.run_all(naming, path.parent if path is not None else Path(), run_plugin)
    root = override(root, overrides)  # after the plug-ins, because it needs the names of their options
    if not schema.OWN and (found := mistakes.find(root)):
        raise ConfigError([*problems, *found])
    # These import pydantic and the data formats, which takes long.
    from pydantic import ValidationError

    from adtrain.config import explain
    from adtrain.config.document import Config, Source
    from adtrain.config.records import name_of

    copyreg.pickle(Config, _pickled)
    values = cast(dict[str, Any], root.plain())
    if path is not None:
        values.setdefault("name", name_of(path.stem))
    try:
        cfg = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError([*problems, *explain.problems(error, root)]) from None
    cfg = cfg.model_copy(update={"plugins": named})
    cfg._source = Source(path, root)
    from adtrain.config import build  # here, because it imports all layers and optimizers

    problems += build.check(cfg)
    if problems:
        raise ConfigError(problems)
    for warning in build.warnings(cfg):
        _log.warning("adtrain: warning: %s", warning)
    return cfg


def varied(cfg: Config, values: Mapping[str, Node]) -> Config:
    """The config with other values at dotted keys, and without its section `sweep`. Raises ConfigError as `load`."""
    root = with_nodes(without(cfg.source.root, "sweep"), values)
    found = _checked(root, cfg.source.path, (), [], (), plugged.keep)
    return found.model_copy(update={"plugins": cfg.plugins})


def _of_plugins(overrides: Overrides) -> Overrides:
    """The overrides that name plug-ins."""
    if isinstance(overrides, Mapping):
        return {key: value for key, value in overrides.items() if str(key).strip().startswith("plugins")}
    return [setting for setting in overrides if setting.strip().startswith("plugins")]


def of_data(overrides: Sequence[str]) -> list[str]:
    """Overrides of keys of the section data as overrides of a config. Keys get the prefix `data.` if they have none."""
    return ["data." + setting.removeprefix("data.") for setting in overrides]


def load_data(values: Mapping[str, str], overrides: Sequence[str] = ()) -> Data:
    """A data section with the keys `values` (`dataset` or `path`) and with `key=value` overrides of its keys.

    The keys of overrides may have the prefix `data.`. Raises ConfigError that lists every problem.
    """
    from pydantic import ValidationError

    from adtrain.config import explain
    from adtrain.config.document import Data

    section = {name: Node("data", value) for name, value in values.items()}
    root = Node("data", {"data": Node("data", section, dict.fromkeys(section, "data"))}, {"data": "data"})
    root = override(root, of_data(overrides))
    try:
        return Data.model_validate(root.find(("data",))[0].plain())
    except ValidationError as error:
        raise ConfigError(explain.problems(error, root, ("data",))) from None


def dump(cfg: Config) -> str:
    """The config as YAML, with all defaults; loading it gives an equal config."""
    values = cfg.model_dump(mode="json", exclude_none=True)
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)


def inline(value: Any) -> str:
    """A value as YAML on one line; reading it gives an equal value."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


class _Dumper(yaml.SafeDumper):
    """Quotes strings that `source` would read as numbers. PyYAML reads some of them, such as 1e3, as strings."""


_Dumper.add_implicit_resolver(f"{source.TAG}int", source.INTEGER, list("-+0123456789"))
_Dumper.add_implicit_resolver(f"{source.TAG}float", source.FLOAT, list("-+.0123456789"))
