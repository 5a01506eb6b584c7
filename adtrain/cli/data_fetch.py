"""`adtrain data fetch`: downloads a data set of the catalogue."""

from __future__ import annotations

import sys
from typing import Any

import click
from tqdm import tqdm

from adtrain.cli.output import progress, show
from adtrain.data import catalogue


@click.command("fetch", short_help="Download a data set, and verify it.")
@click.argument("name")
@click.option("--mirror", metavar="URL", help="Download from this folder: an http, https or file URL.")
def fetch(name: str, mirror: str | None) -> None:
    """Download the data set NAME into the user's cache and verify it; an interrupted download continues.

    Use it in a config by `data: {dataset: NAME}`. `adtrain data list` shows the names.
    """
    from adtrain.data import fetch as fetching

    display = _DownloadProgress()
    try:
        folder = fetching.fetch(catalogue.find(name), mirror, display.update)
    finally:
        display.close()
    show(folder)


class _DownloadProgress:
    """Shows each file as a progress bar on a terminal, otherwise as a line."""

    def __init__(self) -> None:
        self.name = ""
        self.bar: tqdm[Any] | None = None

    def update(self, name: str, done: int, total: int | None) -> None:
        """Show that `done` of the file's `total` bytes have been downloaded."""
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
        """Remove the bar, so that other output can follow."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
