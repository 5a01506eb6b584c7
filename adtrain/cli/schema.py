"""`adtrain schema`: prints the JSON Schema of configs."""

from __future__ import annotations

import json

import click

from adtrain.cli.output import show
from adtrain.config.document import Config, Data, Model, Training
from adtrain.config.specs import specs_as_unions


@click.command()
def command() -> None:
    """Print the JSON Schema of configs, with which editors complete keys and check values."""
    show(*text().splitlines())


def text() -> str:
    """The content of configs/schema.json."""
    with specs_as_unions(Data, Model, Training, Config):
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
    return json.dumps(schema, indent=1) + "\n"
