"""The options about the output of commands that measure: text, JSON, and a page."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from adtrain.bench import page, text
from adtrain.bench.result import Result
from adtrain.cli.options import OutputFile, json_option
from adtrain.cli.output import STDOUT, print_json, progress, show, write_file
from adtrain.table import terminal_width


@dataclass(frozen=True)
class Output:
    """The options about the result."""

    as_json: bool
    json_file: Path | None
    html_file: Path | None

    def write(self, result: Result) -> None:
        values = result.to_json()
        if self.as_json:
            print_json(values)
        else:
            show(*text.render(result, terminal_width()))
        if self.json_file is not None:
            write_file(self.json_file, json.dumps(values, indent=2, allow_nan=False).encode() + b"\n")
        if self.html_file is not None:
            write_file(self.html_file, page.render(result).encode())
        for file in (self.json_file, self.html_file):
            if file is not None and file != STDOUT:
                progress(f"wrote {file}")


def output_options(command: Callable[..., None]) -> Callable[..., None]:
    """`--json`, `--json-file FILE` and `--html FILE`; passed to the command as `output`."""

    @click.option(
        "--html", "html_file", type=OutputFile(".html"), metavar="FILE", help="Write a page with plots: FILE.html."
    )
    @click.option("--json-file", type=OutputFile(), metavar="FILE", help="Also write the result as JSON.")
    @json_option
    @functools.wraps(command)
    def with_output(*args: Any, as_json: bool, json_file: Path | None, html_file: Path | None, **options: Any) -> None:
        command(*args, output=Output(as_json, json_file, html_file), **options)

    return with_output
