"""The check of configs by their JSON Schema finds what pydantic finds, and reports it in the same words."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_files import FULL, small
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from adtrain.config import Config, explain, mistakes, packaged, source, specs
from adtrain.config.document import Data, EarlyStopping, Lora, Model, ParameterGroup, Training
from adtrain.config.problems import Problem
from adtrain.config.source import Node
from adtrain.config.specs import Term
from adtrain.files import asset_path

BASE: dict[str, Any] = yaml.safe_load(small("{linear: 10}"))
VALUES: tuple[Any, ...] = (
    None, True, 0, 1, -1, 1.5, 1e39, math.nan, 10**400, "", "x", "a\0", "relu", "auto",
    [], [1], [1, 2], [1, "x"], ["relu"], [["relu"]], [3.5, None],
    {}, {"x": 1}, {"x": "y"}, {"relu": 3}, {"1": 0, "b": 2},
)  # fmt: skip
AT = {
    "layer": ("model", "layers", 0),
    "loss": ("loss",),
    "optimizer": ("optimizer",),
    "schedule": ("schedule",),
    "average": ("training", "average"),
    "augmentation": ("data", "augment", 0),
    "data set": ("data", "dataset"),
    "metric": ("training", "metrics", 0),
}
"""A place of a class of each family."""
SECTIONS: dict[tuple[str | int, ...], Any] = {
    (): Config,
    ("data",): Data,
    ("model",): Model,
    ("training",): Training,
    ("training", "early_stopping"): EarlyStopping,
    ("lora",): Lora,
    ("parameter_groups", 0): ParameterGroup,
    ("loss", 0): Term,
}


def with_value(document: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """The document with a value at a path. Lists on the path have one item."""
    if not path:
        return value
    part, *rest = path
    if isinstance(part, int):
        inner = document[part] if isinstance(document, list) and part < len(document) else None
        return [with_value(inner, tuple(rest), value)]
    document = dict(document) if isinstance(document, dict) else {}
    return {**document, part: with_value(document.get(part), tuple(rest), value)}


def numbered(value: Any) -> Node:
    """The nodes of a document, each with a position of its own."""
    count = iter(range(10**6))

    def node(value: Any) -> Node:
        where = f"file:{next(count)}"
        if isinstance(value, list):
            return Node(where, [node(item) for item in value])
        if isinstance(value, dict):
            return Node(
                where, {key: node(item) for key, item in value.items()}, {key: f"{where}:{key}" for key in value}
            )
        return Node(where, value)

    return node(value)


def by_pydantic(root: Node) -> list[Problem]:
    try:
        Config.model_validate(root.plain())
    except ValidationError as error:
        return explain.problems(error, root)
    return []


def documents() -> Iterator[dict[str, Any]]:
    """A document for each key of each section, each option of each class, and each of VALUES there."""
    for section, model in SECTIONS.items():
        for key in [*model.model_fields, "unknown"]:
            for value in VALUES:
                yield with_value(BASE, (*section, key), value)
    for family, at in AT.items():
        for kind, spec in specs.FAMILIES[family].items():
            for value in [kind, *({kind: value} for value in VALUES)]:
                yield with_value(BASE, at, value)
            for option in [*spec.model_fields, "unknown"]:
                for value in VALUES:
                    yield with_value(BASE, at, {kind: {option: value}})
    for at in [*filter(None, SECTIONS), *AT.values()]:
        for value in VALUES:
            yield with_value(BASE, at, value)


@pytest.mark.exhaustive
def test_the_schema_finds_what_pydantic_finds_in_each_key_and_option() -> None:
    of_classes_only = set()
    for document in documents():
        root = numbered(document)
        by_schema, by_classes = mistakes.find(root), by_pydantic(root)
        assert by_schema in ([], by_classes), document
        of_classes_only |= {problem.path for problem in by_classes if not by_schema}
    assert of_classes_only == {"data", "training"}  # options that exclude each other


PLACES = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@given(st.lists(st.tuples(PLACES, st.sampled_from(VALUES)), min_size=1, max_size=3))
def test_the_schema_finds_what_pydantic_finds_where_several_values_are_wrong(
    changes: list[tuple[list[int], Any]],
) -> None:
    document = yaml.safe_load(FULL)
    for place, value in changes:
        inner = document
        for choice in place:  # down to a value, which is replaced
            places: list[Any] = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            place_of_value = places[choice % len(places)]
            if not (isinstance(inner[place_of_value], (dict, list)) and inner[place_of_value]):
                break
            inner = inner[place_of_value]
        inner[place_of_value] = deepcopy(value)
    root = numbered(document)
    by_schema, by_classes = mistakes.find(root), by_pydantic(root)
    assert by_schema == [problem for problem in by_classes if problem in by_schema]
    assert all(problem.path in ("data", "training") for problem in by_classes if problem not in by_schema)


@pytest.mark.parametrize("name", packaged())
def test_the_schema_finds_nothing_in_packaged_configs(name: str) -> None:
    root, _ = source.read((asset_path("configs") / f"{name}.yaml").read_bytes(), name)
    assert mistakes.find(root) == []


def test_wrong_values_are_reported_before_the_long_imports(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(FULL.replace("epochs: 3", "epochs: -1").replace("- flatten", "- flaten"))
    program = """\
import sys
from adtrain import config
try:
    config.load("c.yaml", ["optimizer={sgd: {lr: high}}"])
except config.ConfigError as error:
    print(error)
print({"pydantic", "adtrain.nn", "adtrain.data.formats"} & {*sys.modules})
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "c.yaml:15:7: model.layers[7]: unknown layer 'flaten'; did you mean flatten?",
        "--set optimizer: optimizer.sgd.lr: found 'high', expected a number in (0, 3.4e38]",
        "c.yaml:23:20: training.epochs: found -1, expected an integer in [1, 2^31)",
        "set()",
    ]
