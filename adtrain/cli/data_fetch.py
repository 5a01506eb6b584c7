"""`adtrain data fetch`: a data set of the catalogue, from the network."""

from __future__ import annotations

import sys
from typing import Any

import click
from tqdm import tqdm

from adtrain.cli.options import progress
from adtrain.data import catalogue


@click.command("fetch")
@click.argument("name")
@click.option("--mirror", metavar="URL", help="Take the files from this folder: http, https, or file for a copy.")
def fetch(name: str, mirror: str | None) -> None:
    """Fetch the data set NAME into the user's cache, and check it; go on where an earlier call was cut off.

    `data: {dataset: NAME}` then trains on it. The names are those of `adtrain data list`.
    """
    from adtrain.data import fetch as fetching

    display = _Display()
    try:
        folder = fetching.fetch(catalogue.find(name), mirror, display.chunk)
    finally:
        display.close()
    click.echo(folder)


class _Display:
    """A bar a file on a terminal, a line elsewhere."""

    def __init__(self) -> None:
        self.name = ""
        self.bar: tqdm[Any] | None = None

    def chunk(self, name: str, done: int, total: int | None) -> None:
        """So many bytes of the file are here."""
        if name != self.name:
            self.close()
            self.name = name
            if sys.stderr.isatty():
                self.bar = tqdm(total=total, desc=name[:24], unit="B", unit_scale=True, leave=False, dynamic_ncols=True)
            else:
                progress(f"{name}: {'size unknown' if total is None else f'{total / 1e6:,.1f} MB'}")
        if self.bar is not None:
            self.bar.update(done - self.bar.n)

    def close(self) -> None:
        """Leave the terminal ready for other output."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
