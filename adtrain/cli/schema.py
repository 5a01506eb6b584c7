"""`adtrain schema`: prints the JSON Schema of configs."""

from __future__ import annotations

import click

from adtrain.cli.output import show
from adtrain.config import schema


@click.command()
def command() -> None:
    """Print the JSON Schema of configs, with which editors complete keys and check values."""
    show(*schema.text().splitlines())
