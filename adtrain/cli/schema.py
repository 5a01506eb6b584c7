"""`adtrain schema`: prints the JSON Schema of configs."""

from __future__ import annotations

import json
from typing import Any

import click
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from adtrain.cli.output import show
from adtrain.config.document import Config, Data, Model, Training
from adtrain.config.schema import WORDS
from adtrain.config.specs import specs_as_unions


@click.command()
def command() -> None:
    """Print the JSON Schema of configs, with which editors complete keys and check values."""
    show(*text().splitlines())


def text() -> str:
    """The content of configs/schema.json."""
    with specs_as_unions(Data, Model, Training, Config):
        schema = Config.model_json_schema(schema_generator=_WithWords)
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return json.dumps(schema, indent=1) + "\n"


class _WithWords(GenerateJsonSchema):
    """Adds what an error says that it expects. A chain checks a mapping of names, then its values."""

    def custom_error_schema(self, schema: core_schema.CustomErrorSchema) -> dict[str, Any]:
        return {**super().custom_error_schema(schema), WORDS: schema["custom_error_message"]}

    def chain_schema(self, schema: core_schema.ChainSchema) -> dict[str, Any]:
        mapping, values = map(self.generate_inner, schema["steps"])
        return {**values, WORDS: mapping[WORDS]}
