"""Where a config is by its name: a file, a packaged config, or the folder of a run or sweep. No config is read."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from adtrain.config.problems import ConfigError, Problem, known, listed
from adtrain.files import asset_path

RUN_CONFIG = "config.yaml"
"""The resolved config in the folder of a run."""

SWEEP_CONFIG = "sweep.yaml"
"""The config in the folder of a sweep."""

MOST_RUNS = 8
"""Runs that an error names."""

DATA = (".csv", ".tsv", ".npz")
"""The endings of files that hold data and no config."""


def packaged() -> list[str]:
    """The names of the configs that come with adtrain."""
    return sorted(path.stem for path in asset_path("configs").glob("*.yaml"))


def find_config(name: str) -> Path:
    """The file of a config, or the folder of a run, that `load` takes by this name. Raises ConfigError for neither."""
    writes = f"adtrain new {shlex.quote(name)} prints a config for data"
    if os.path.exists(name) and not os.path.isdir(name):
        if name.lower().endswith(DATA):
            raise ConfigError([Problem(name, "", f"found data, expected a YAML file; {writes}")])
        return Path(name)
    names = packaged()
    if name in names:
        return asset_path("configs") / f"{name}.yaml"
    if is_run(name):
        return Path(name)
    if os.path.isdir(name):
        expected = "expected a YAML file or the folder of a run"
        found = f"found a folder without {RUN_CONFIG}, {expected}; {writes}"
        raise ConfigError([Problem(name, "", sweep_for_run(name) or found)])
    message = f"neither a file nor a packaged config; {known(Path(name).stem, names, 'packaged')}"
    if os.path.dirname(name) and not name.endswith((".yaml", ".yml")):
        message = f"found nothing, expected a YAML file or the folder of a run; {_runs_in(os.path.dirname(name))}"
    raise ConfigError([Problem(name or "''", "", message)])


def _runs_in(folder: str) -> str:
    """The runs in a folder, for a message."""
    found = sorted(str(path.parent) for path in Path(folder).glob(f"*/{RUN_CONFIG}"))
    return listed(found[-MOST_RUNS:], f"runs in {folder}")


def is_run(name: str) -> bool:
    """Whether `load` takes this name for the folder of a run."""
    return os.path.isfile(os.path.join(name, RUN_CONFIG)) and name not in packaged()


def is_sweep(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a sweep."""
    return os.path.isfile(os.path.join(path, SWEEP_CONFIG))


def sweep_for_run(path: str | os.PathLike[str]) -> str | None:
    """What is wrong with a path that must be a run, if it is the folder of a sweep; otherwise None."""
    if not is_sweep(path):
        return None
    members = Path(path, "members")
    first = next((run.name for run in sorted(members.glob("*")) if is_run(str(run))), "N")
    return f"found a sweep, expected a run, such as that of a member: {members / first}"
