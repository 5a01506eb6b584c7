"""Options and output functions that several commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from tqdm import tqdm

from adtrain.core.backend import backend
from adtrain.core.errors import DeviceError

Function = TypeVar("Function", bound=Callable[..., Any])


def progress(text: str) -> None:
    """Print a line of progress or a note to stderr."""
    click.echo(text, err=True)


def print_json(value: object) -> None:
    """Print the result as JSON. Raises ValueError for NaN and infinity, which JSON does not have."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def resolve_device(device: str) -> str:
    """The device to run on, "cpu" or "gpu". "auto" is the GPU if there is one, with a note on stderr.

    Raises:
        DeviceError: `device` is "gpu", and the GPU or a library for it is missing.
    """
    if device == "cpu":
        return device
    try:
        found = backend("gpu")
    except DeviceError:
        if device == "gpu":
            raise
        return "cpu"
    if device == "auto":
        progress(f"running on gpu, {found.device_name()}")
    return "gpu"


def device_option(function: Function) -> Function:
    """`--device auto|cpu|gpu`; passed to the command after `resolve_device`."""
    return click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "gpu"]),
        default="auto",
        show_default=True,
        callback=lambda ctx, param, value: resolve_device(value),
        help="Where to run.",
    )(function)


def autotune_option(function: Function) -> Function:
    """`--autotune off|cached|full`, passed to the command as `autotune`; see `set_autotune`."""
    return click.option(
        "--autotune",
        type=click.Choice(["off", "cached", "full"]),
        default="cached",
        show_default=True,
        help="Which of a GPU's kernels for an operation to use: the first (off), the fastest of an earlier "
        "measurement, otherwise the first (cached), or the fastest, measured if unknown (full).",
    )(function)


def set_autotune(device: str, autotune: str) -> None:
    """Set how the device chooses its kernels.

    Raises:
        UsageError: `autotune` is "full" on the CPU, which has only one kernel for each operation.
    """
    if device == "gpu":
        from adtrain.backends.cuda.tuner.autotune import Mode

        tuner = cast(Any, backend(device)).tuner
        tuner.mode = Mode(autotune)
        tuner.report = lambda line: tqdm.write(line, file=sys.stderr)  # prints above a progress bar
    elif autotune == "full":
        raise click.UsageError("--autotune full: only a GPU has kernels to choose from, and this runs on the CPU")


class FilePath(click.Path):
    """A parameter of type Path. Refuses an empty string, as from an unset shell variable, because Path("") is "."."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("found an empty path", param, ctx)
        return super().convert(value, param, ctx)


def set_option(function: Function) -> Function:
    """`--set K=V`, repeatable; passed to the command as `overrides`."""
    return click.option(
        "--set", "overrides", multiple=True, metavar="K=V", help="Override a value by its dotted key; repeatable."
    )(function)


def json_option(function: Function) -> Function:
    """`--json`, passed to the command as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(function)


def mode_options(function: Function) -> Function:
    """`--eager` and `--no-fuse`; passed to the command as `mode`, the value of a `training.Mode` or None."""
    eager = click.option("--eager", "mode", flag_value="eager", help="Run the step operation by operation.")
    staged = click.option("--no-fuse", "mode", flag_value="staged", help="Run each operation as a separate kernel.")
    return eager(staged(function))
