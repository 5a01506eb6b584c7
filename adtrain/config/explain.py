"""Pydantic's validation errors as config problems: position in the file, what was found, what was expected."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from adtrain.config import mistakes
from adtrain.config.document import Config, Data, EarlyStopping, Lora, Model, ParameterGroup, Plugin, Section, Training
from adtrain.config.problems import PathParts, Problem
from adtrain.config.source import Node
from adtrain.config.specs import FAMILIES, Term, by_kind
from adtrain.core.options import is_option, words

MODELS: dict[str, type[BaseModel]] = {
    "data": Data,
    "model": Model,
    "training": Training,
    "early_stopping": EarlyStopping,
    "plugins": Plugin,
    "parameter_groups": ParameterGroup,
    "lora": Lora,
    "terms": Term,
}
"""The pydantic model of the value at each key that is not a name of a layer, loss or other class."""


def problems(error: ValidationError, root: Node, section: PathParts = ()) -> list[Problem]:
    """The problems of a validation error; `section` is the path from `root` to what was validated."""
    return [_problem(details, root, section) for details in error.errors(include_url=False)]


def _problem(details: ErrorDetails, root: Node, section: PathParts) -> Problem:
    path = (*section, *details["loc"])
    match details["type"]:
        case "missing":
            return mistakes.missing(path, root, _expected_words(_parent_model(path), str(path[-1])))
        case "extra_forbidden":
            return mistakes.unknown_key(path, root, tuple(_parent_model(path).model_fields))
        case "union_tag_invalid":
            return mistakes.unknown_name(path, root, details["ctx"]["tag"], _names(path))
        case "union_tag_not_found":
            return mistakes.no_name(path, root, _names(path))
        case "expected":
            words = details["msg"]
        case "model_type" | "dict_type":
            words = mistakes.mapping(path)
        case "list_type":
            words = mistakes.A_LIST
        case "too_short":
            words = mistakes.NOT_EMPTY
        case _:  # a bound in the annotation of a plug-in's option
            words = details["msg"].removeprefix("Input should be ").removeprefix("a valid ")
            words = f"{words[:1].lower()}{words[1:]}"
    return mistakes.expected(path, root, words)


def _names(path: PathParts) -> tuple[str, ...]:
    """The names of the classes that can be at `path`."""
    return tuple(FAMILIES[mistakes.family_of(path)])


def _parent_model(path: PathParts) -> type[BaseModel]:
    """The model that has the last part of the path as a field."""
    model: type[BaseModel] = Config
    for before, part in pairwise(("", *path[:-1])):
        if part in MODELS:
            model = MODELS[str(part)]
        # An item of a list is a class, even if its name is also a field, such as the metric `precision`.
        elif isinstance(part, str) and (part not in model.model_fields or isinstance(before, int)):
            model = by_kind(part) or model
    return model


def _expected_words(model: type[BaseModel], name: str) -> str | None:
    """What a field takes, in words."""
    info = model.model_fields[name]
    if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
        return mistakes.mapping((name,))
    hint = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
    return words(hint) if is_option(hint) else info.description
