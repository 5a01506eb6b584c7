"""Where the result of a `bench` command goes: tables, JSON, an HTML page."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from adtrain.bench import page, text
from adtrain.cli.options import FilePath, json_option
from adtrain.cli.output import print_json, print_text, show
from adtrain.core.errors import AdtrainError
from adtrain.files import write_atomic
from adtrain.table import terminal_width

STDOUT = Path("-")


@dataclass(frozen=True)
class Output:
    """The options about the result: `as_json` and the page `-` replace the tables on standard output."""

    as_json: bool
    json_file: Path | None
    html_file: Path | None

    def __post_init__(self) -> None:
        """Raise UsageError or AdtrainError, before anything is measured, for a file that cannot be written."""
        if self.json_file == STDOUT:
            raise click.UsageError("--json-file - is not a file; --json prints the result")
        if self.as_json and self.html_file == STDOUT:
            raise click.UsageError("--json and --html -: only one result fits on standard output")
        for option, file in (("--json-file", self.json_file), ("--html", self.html_file)):
            if file not in (None, STDOUT):
                check_writable(option, file)

    def write(self, result: Mapping[str, Any]) -> None:
        if self.as_json:
            print_json(result)
        elif self.html_file == STDOUT:
            print_text(page.render(result))
        else:
            show(*text.render(result, terminal_width()))
        if self.json_file is not None:
            write_atomic(self.json_file, json.dumps(result, indent=2, allow_nan=False).encode() + b"\n")
        if self.html_file not in (None, STDOUT):
            write_atomic(self.html_file, page.render(result).encode())


def output_options(command: Callable[..., None]) -> Callable[..., None]:
    """`--json`, `--json-file FILE` and `--html FILE`; passed to the command as `output`."""

    @click.option("--html", "html_file", type=FilePath(), metavar="FILE", help="Write a page with plots; - prints it.")
    @click.option("--json-file", type=FilePath(), metavar="FILE", help="Also write the result as JSON.")
    @json_option
    @functools.wraps(command)
    def with_output(*args: Any, as_json: bool, json_file: Path | None, html_file: Path | None, **options: Any) -> None:
        command(*args, output=Output(as_json, json_file, html_file), **options)

    return with_output


def check_writable(option: str, path: Path) -> None:
    """Raise AdtrainError if the file cannot be written."""
    if path.is_dir():
        raise AdtrainError(f"{option} {path}: is a folder, expected a file")
    if not os.access(path.absolute().parent, os.W_OK):
        raise AdtrainError(f"{option} {path}: {path.parent} is not a writable folder")
