"""The keys of configs, without an import of the classes that have them, which takes long.

The keys are those of the JSON Schema, `configs/schema.json`, which is made from these classes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from adtrain.config.problems import PathParts
from adtrain.config.source import Node
from adtrain.files import asset_path

Names = tuple[str, ...]

SECTIONS = {
    "data": "Data",
    "model": "Model",
    "training": "Training",
    "early_stopping": "EarlyStopping",
    "lora": "Lora",
}
"""The definition in the schema of the mapping at each key."""
ITEMS = {"plugins": "Plugin", "parameter_groups": "ParameterGroup", "loss": "Term"}
"""The definition of an item of the list at each key."""


def of_mapping(path: PathParts) -> Names | None:
    """The keys of the mapping at `path` in a config, in their order.

    None where keys are names of layers, variables or others, and for a class of a plug-in.
    """
    if not path:
        return tuple(_schema()["properties"])
    *above, last = path
    if path[0] == "sweep":  # its keys are those of the whole config
        return None
    name = ITEMS.get(str(above[-1])) if isinstance(last, int) else SECTIONS.get(last)
    if name is not None:
        return _properties(_schema()["$defs"][name])
    is_class = of_mapping(tuple(above)) is None  # otherwise a key, such as `precision`, which is also a metric
    return options().get(str(last)) if is_class else None


@cache
def options() -> dict[str, Names]:
    """The options of the package's layers, losses, optimizers and other classes, by their names in a config."""
    found: dict[str, Names] = {}
    for definition in _schema()["$defs"].values():
        for form in _forms(definition):  # a class has one key, its name, with the options in one of several forms
            properties = form.get("properties", {})
            if list(properties) == form.get("required") and "anyOf" in (named := next(iter(properties.values()))):
                found |= dict.fromkeys(properties, _properties(named))
    return found


def unknown(root: Node, settings: Iterable[Sequence[str]]) -> list[PathParts]:
    """The first part of each setting's key that the config cannot have, with the parts before it.

    `root` is the config with the settings. What is in classes of plug-ins, or in places with another mistake, is left
    to the validation.
    """
    found: list[PathParts] = []
    for key in settings:
        node, path = root, PathParts()
        for part in key:
            if isinstance(node.value, list):
                path = (*path, int(part))
            else:
                names = of_mapping(path)
                if names is not None and part not in names:
                    found.append((*path, part))
                is_class = part in options() and isinstance(node.value, dict) and len(node.value) == 1
                if part not in (names or ()) and not (names is None and is_class):
                    break
                path = (*path, part)
            node, _ = node.find(path[-1:])
    return found


@cache
def _schema() -> Any:
    return json.loads((asset_path("configs") / "schema.json").read_bytes())


def _forms(definition: Any) -> list[Any]:
    forms: list[Any] = definition.get("anyOf", [definition])
    return forms


def _properties(definition: Any) -> Names:
    """The keys of a definition: those of its form that is a mapping."""
    return tuple(next((form["properties"] for form in _forms(definition) if "properties" in form), ()))
