"""Options that several commands share, and how they print."""

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
    """A line for the person watching; never part of the result."""
    click.echo(text, err=True)


def print_json(value: object) -> None:
    """The result for a program. ValueError on NaN and infinities, which JSON has no words for."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def resolve_device(device: str) -> str:
    """The device to run on, "cpu" or "gpu"; for "auto" the GPU where there is one, which is said.

    Raises:
        DeviceError: the GPU is asked for, and it or a library for it is missing.
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
    """`--device auto|cpu|gpu`; the command receives the device it resolves to."""
    return click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "gpu"]),
        default="auto",
        show_default=True,
        callback=lambda ctx, param, value: resolve_device(value),
        help="Where to run.",
    )(function)


def autotune_option(function: Function) -> Function:
    """`--autotune off|cached|full`, received as `autotune`; see `set_autotune`."""
    return click.option(
        "--autotune",
        type=click.Choice(["off", "cached", "full"]),
        default="cached",
        show_default=True,
        help="Where a GPU has several kernels for an operation, take the first (off), the one that was measured to be "
        "fastest if that is known (cached), or measure where it is not known (full).",
    )(function)


def set_autotune(device: str, autotune: str) -> None:
    """Let the device choose its kernels so, from now on.

    Raises:
        UsageError: they are to be measured on the CPU, which has one of each.
    """
    if device == "gpu":
        from adtrain.backends.cuda.tuner.autotune import Mode

        tuner = cast(Any, backend(device)).tuner
        tuner.mode = Mode(autotune)
        tuner.report = lambda line: tqdm.write(line, file=sys.stderr)  # above a bar that may be running
    elif autotune == "full":
        raise click.UsageError("--autotune full: only a GPU has kernels to choose from, and this runs on the CPU")


class FilePath(click.Path):
    """A path, received as a Path; never an empty text, which an unset shell variable gives, for that is `.` to Path."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("found an empty path", param, ctx)
        return super().convert(value, param, ctx)


def set_option(function: Function) -> Function:
    """`--set K=V`, as often as one likes; received as `overrides`."""
    return click.option(
        "--set", "overrides", multiple=True, metavar="K=V", help="Override a value by its dotted key; repeatable."
    )(function)


def json_option(function: Function) -> Function:
    """`--json`, received as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")(function)


def mode_options(function: Function) -> Function:
    """`--eager` and `--no-fuse`; received as `mode`, the value of a `training.Mode`, or None."""
    eager = click.option("--eager", "mode", flag_value="eager", help="Run the step operation by operation.")
    staged = click.option("--no-fuse", "mode", flag_value="staged", help="Run each operation by a kernel of its own.")
    return eager(staged(function))
