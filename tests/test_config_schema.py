from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import yaml
from command_line import command
from config_files import FULL, small

from adtrain.cli import schema
from adtrain.config import Config, explain, packaged, specs
from adtrain.config import schema as of_schema
from adtrain.config.specs import Equations, Term
from adtrain.files import asset_path

KINDS = [item for family in specs.FAMILIES.values() for item in family.items()]
SCHEMA = json.loads((asset_path("configs") / "schema.json").read_text())


def values(text: str) -> Any:
    return yaml.safe_load(text)


@cache
def validator() -> Any:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    return jsonschema.Draft202012Validator(SCHEMA)


def test_the_schema_file_is_what_the_command_prints() -> None:
    printed = command("schema")
    expected = (asset_path("configs") / "schema.json").read_text()
    assert printed.stdout == expected, "run: adtrain schema > configs/schema.json"


def test_the_schema_does_not_depend_on_the_layers_that_configs_have_used() -> None:
    for kind in ("concat", "add", "multiply", "residual"):
        specs.LAYERS[kind].model_rebuild(force=True)
    assert json.loads(schema.text()) == SCHEMA


def test_the_schema_has_every_kind_and_option() -> None:
    terms = SCHEMA["$defs"]["Term"]["properties"]
    assert set(terms) == set(Term.model_fields)
    for kind, spec in KINDS:
        if spec is Equations:  # a list, whose items are the terms
            continue
        definition = SCHEMA["$defs"][spec.__name__]
        long_form = next(form for form in definition.get("anyOf", [definition]) if "properties" in form)
        options = long_form["properties"][kind]["anyOf"][0]
        assert set(options.get("properties", {})) == set(spec.model_fields)


def test_the_schema_tells_the_keys_of_sections_and_classes_in_their_order() -> None:
    assert of_schema.keys_of() == tuple(Config.model_fields)
    for section in ("data", "model", "training"):
        assert of_schema.keys_of(section) == tuple(explain.MODELS[section].model_fields), section
    for kind, spec in KINDS:
        assert of_schema.options_of(kind) == tuple(spec.model_fields), kind
    assert set(of_schema.classes()) == {kind for kind, _ in KINDS}


def test_defaults_are_valid_values_of_their_options() -> None:
    examples = {"body": ["relu"], "branches": [["relu"]], "milestones": [1], "shape": [1], "indices": [1]}
    examples["terms"] = [{"equation": "u"}]
    for kind, spec in KINDS:
        fields = spec.model_fields.items()
        required = {name: examples.get(name, 1) for name, info in fields if info.is_required()}
        defaults = {name: info.default for name, info in fields if not info.is_required()}
        assert spec.model_validate({kind: required | defaults}) == spec.model_validate({kind: required})


def test_names_are_unique_across_families() -> None:
    assert len(dict(KINDS)) == len(KINDS)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in ("mlp", "burgers") else pytest.mark.exhaustive) for x in packaged()]
)
def test_packaged_configs_fit_the_schema(name: str) -> None:
    text = (asset_path("configs") / f"{name}.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    validator().validate(values(text))


def test_short_and_long_forms_fit_the_schema() -> None:
    layers = "relu", "tanh:", "linear: 3", "max_pool2d: [2, 2]", "dropout", "residual: [relu]", "add: [[relu], [elu:]]"
    for text in (FULL, small(*layers)):
        validator().validate(values(text))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("epochs: 3", "epochs: 0"),
        ("epochs: 3", "epoch: 3"),
        ("- relu", "- rellu"),
        ("lr: 0.001", "lr: -1"),
        ("padding: 1", "padding: [1, 2, 3]"),
        ("- flatten", "- flatten: 3"),
        ("p: 0.5", "p: 1"),
    ],
)
def test_wrong_values_do_not_fit_the_schema(old: str, new: str) -> None:
    assert not validator().is_valid(values(FULL.replace(old, new)))
