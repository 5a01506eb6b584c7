"""Reads the JSON Schema of configs, `configs/schema.json`.

The file is made from the classes of sections, layers, losses and others (`document.json_schema`). It says what a config
may contain without an import of these classes, which takes long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeAlias

from adtrain.files import asset_path

Names = tuple[str, ...]
Schema: TypeAlias = Mapping[str, Any]

WORDS = "errorMessage"
"""The keyword with what a value must be, in words: "found X, expected WORDS". It is not a keyword of JSON Schema, but
some editors show it."""
NULL = {"type": "null"}

OWN: dict[str, Names] = {}
"""The options of the classes that plug-ins have registered, by name; `specs.add` adds them. The schema lacks these."""


@cache
def of_config() -> Schema:
    """The schema of a whole config."""
    schema: Schema = json.loads((asset_path("configs") / "schema.json").read_bytes())
    return schema


def resolved(schema: Schema) -> Schema:
    """The schema that a reference names; another schema as it is."""
    return _definition(schema["$ref"]) if "$ref" in schema else schema


def _definition(reference: str) -> Schema:
    definition: Schema = of_config()["$defs"][reference.rpartition("/")[2]]
    return definition


def form(schema: Schema, value: object) -> Schema:
    """The form that a value is meant to have, of the several in `anyOf`.

    Null is meant as `null` if that is a form. A string is meant as the first other form, any other value as the last.
    """
    schema = resolved(schema)
    if "anyOf" not in schema or WORDS in schema:
        return schema
    if value is None and NULL in schema["anyOf"]:
        return NULL
    others = [each for each in schema["anyOf"] if each != NULL]
    return form(others[0 if isinstance(value, str) else -1], value)


def keys_of(section: str | None = None) -> Names:
    """The keys of a section, such as `data`, or of the whole config, in their order."""
    top = of_config()["properties"]
    return tuple(top if section is None else form(top[section], {})["properties"])


@cache
def classes() -> dict[str, Schema]:
    """The schema of the options of each layer, loss and other class of the package, by its name in a config."""
    found: dict[str, Schema] = {}
    for definition in of_config()["$defs"].values():
        named = form(definition, {})  # a class has one key, its name, with the options in one of several forms
        properties = named.get("properties", {})
        if list(properties) == named.get("required") and "anyOf" in (inner := next(iter(properties.values()))):
            found |= dict.fromkeys(properties, resolved(inner["anyOf"][0]))
    return found


@cache
def kinds(references: Names) -> Names:
    """The names in a config of the classes that references such as `#/$defs/Linear` name."""
    return tuple(next(iter(form(_definition(each), {})["properties"])) for each in references)


def options_of(kind: str) -> Names | None:
    """The options of a layer, loss or other class in their order; None for a name that is none."""
    return tuple(classes()[kind].get("properties", ())) if kind in classes() else OWN.get(kind)


def fits(value: Any, schema: Schema) -> bool:
    """Whether a value of a config, of plain types, has one of the forms of a schema. Numbers are not converted."""
    schema = resolved(schema)
    if "anyOf" in schema:
        return any(fits(value, each) for each in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return value in schema.get("enum", [schema.get("const")])
    match schema.get("type"):
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer" | "number" as kind:
            is_number = isinstance(value, int if kind == "integer" else (int, float)) and not isinstance(value, bool)
            return is_number and _within(value, schema)
        case "string":
            return isinstance(value, str) and re.search(schema.get("pattern", ""), value) is not None
        case "array":
            least, most = schema.get("minItems", 0), schema.get("maxItems", float("inf"))
            if not (isinstance(value, list) and least <= len(value) <= most):
                return False
            items = schema.get("prefixItems", [schema.get("items", {})] * len(value))
            return all(map(fits, value, items))
        case "object":
            if not isinstance(value, dict) or len(value) < schema.get("minProperties", 0):
                return False
            patterns = schema.get("patternProperties", {"": {}})
            return all(
                any(re.search(pattern, key) and fits(item, each) for pattern, each in patterns.items())
                for key, item in value.items()
            )
    return True


def _within(number: float, schema: Schema) -> bool:
    """Whether a number, which may be NaN, is within the bounds of a schema."""
    infinity = float("inf")
    return (
        schema.get("minimum", -infinity) <= number <= schema.get("maximum", infinity)
        and ("exclusiveMinimum" not in schema or schema["exclusiveMinimum"] < number)
        and ("exclusiveMaximum" not in schema or number < schema["exclusiveMaximum"])
    )
