"""`adtrain schema`: prints the JSON Schema of configs."""

from __future__ import annotations

import json

import click

from adtrain.cli.output import show
from adtrain.config.document import json_schema


@click.command()
def command() -> None:
    """Print the JSON Schema of configs, with which editors complete keys and check values."""
    show(*text().splitlines())


def text() -> str:
    """The content of configs/schema.json."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **json_schema()}
    return json.dumps(schema, indent=1) + "\n"
