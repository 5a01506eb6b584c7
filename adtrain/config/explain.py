"""Pydantic's validation errors as config problems: position in the file, what was found, what was expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from adtrain.config import habits, keys
from adtrain.config.document import Config, Data, EarlyStopping, Lora, Model, ParameterGroup, Plugin, Section, Training
from adtrain.config.problems import PathParts, Problem, dotted, found, similar
from adtrain.config.source import Node
from adtrain.config.specs import FAMILIES, Equations, Term, by_kind
from adtrain.core.options import is_option, words

MODELS: dict[str, type[BaseModel]] = {
    "data": Data,
    "model": Model,
    "training": Training,
    "early_stopping": EarlyStopping,
    "plugins": Plugin,
    "parameter_groups": ParameterGroup,
    "lora": Lora,
    "loss": Term,
}
"""The pydantic model of the value at each key that is not a name of a layer, loss or other class."""
FAMILY_AT = {"augment": "augmentation", "dataset": "data set", "metrics": "metric"}
"""The family of the names below a key, where it is not the key."""


def problems(error: ValidationError, root: Node, section: PathParts = ()) -> list[Problem]:
    """The problems of a validation error; `section` is the path from `root` to what was validated."""
    return [_problem(details, root, section) for details in error.errors(include_url=False)]


def _problem(details: ErrorDetails, root: Node, section: PathParts) -> Problem:
    path, value = _without_names((*section, *details["loc"])), details["input"]
    node, key_where = root.find(path)
    names: tuple[str, ...] | None = None
    hint: str | None = None
    where = key_where if isinstance(node.value, (dict, list)) else node.where
    match details["type"]:
        case "expected":
            message = f"found {found(node.plain())}, expected {details['msg']}"
        case "missing":
            where = root.find(path[:-1])[1]
            message = f"missing, expected {_expected_words(_parent_model(path), str(path[-1]))}"
        case "extra_forbidden":
            return habits.unknown_key(path, root, tuple(_parent_model(path).model_fields))
        case "union_tag_invalid":
            name, family = details["ctx"]["tag"], _family(path)
            where = root.find((*path, name))[1] if isinstance(node.value, dict) else where
            names = tuple(FAMILIES[family])
            message, hint = f"unknown {family} {found(name)}", habits.of_name(name, names) or similar(name, names)
            hint = hint or habits.of_class(value, names)
            if owner := next((kind for kind in names if name in _options(family, kind)), None):
                message = f"found the option {name}, expected the name of the {family} before it"
                hint = f"write for example {dotted((*path, owner, name))}"
        case "union_tag_not_found":
            family = _family(path)
            given = [key for key in value if key in FAMILIES[family]] if isinstance(value, dict) else []
            names = None if given else tuple(FAMILIES[family])
            indented = ", its options indented below its name" if len(given) == 1 else ""
            message = f"found {found(value)}, expected one {family}{indented}"
            hint = habits.of_class(value, tuple(FAMILIES[family]))
        case "model_type" | "dict_type":
            message = f"found {found(value)}, expected {_mapping(dotted(path))}"
        case "list_type":
            message = f"found {found(value)}, expected a list"
        case "too_short":
            message = "found [], expected a list that is not empty"
        case _:  # a bound in the annotation of a plug-in's option
            words = details["msg"].removeprefix("Input should be ").removeprefix("a valid ")
            message = f"found {found(node.plain())}, expected {words[:1].lower()}{words[1:]}"
    if hint is not None:
        return Problem(where, dotted(path), f"{message}; {hint}")
    return Problem(where, dotted(path), message, names)


def _options(family: str, kind: str) -> Sequence[str]:
    """The options of a class or function. Those of the package are known without a model."""
    found = keys.options().get(kind)
    return tuple(FAMILIES[family][kind].model_fields) if found is None else found


def _without_names(path: PathParts) -> PathParts:
    """The path in a file, where a loss of equations is a list without the names of its class and of the option."""
    names = ("loss", Equations.kind, "terms")
    return (names[0], *path[len(names) :]) if path[: len(names)] == names else path


def _parent_model(path: PathParts) -> type[BaseModel]:
    """The model that has the last part of the path as a field."""
    model: type[BaseModel] = Config
    for part in path[:-1]:
        if str(part) in MODELS:
            model = MODELS[str(part)]
        elif isinstance(part, str) and part not in model.model_fields:
            model = by_kind(part) or model
    return model


def _expected_words(model: type[BaseModel], name: str) -> str:
    """What a field takes, in words."""
    info = model.model_fields[name]
    if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
        return _mapping(name)
    hint = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
    return words(hint) if is_option(hint) else info.description or "a value"


def _mapping(key: str) -> str:
    """What a section takes, in words."""
    return f"a mapping such as {habits.EXAMPLES[key]}" if key in habits.EXAMPLES else "a mapping of keys to values"


def _family(path: PathParts) -> str:
    words = (FAMILY_AT.get(str(part), str(part)) for part in path)
    return next((word for word in words if word in FAMILIES), "layer")
