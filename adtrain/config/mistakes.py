"""Mistakes in the values and keys of a config, as problems.

`find` finds those that violate the JSON Schema. `explain` makes the same problems of the errors of pydantic, which also
checks what the schema cannot express.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from adtrain.config import habits, schema
from adtrain.config.problems import PathParts, Problem, dotted, found, similar
from adtrain.config.schema import WORDS, Schema
from adtrain.config.source import Node

A_LIST = "a list"
NOT_EMPTY = "a list that is not empty"
NO_OPTIONS = "no options"
EQUATIONS = "equations"
"""The loss that a config has as a list, without this name and that of its option."""
FAMILY_AT = {
    "augment": "augmentation",
    "average": "average",
    "dataset": "data set",
    "loss": "loss",
    "metrics": "metric",
    "optimizer": "optimizer",
    "schedule": "schedule",
}
"""The family of the names of classes below a key. Below other keys they are names of layers."""


def find(root: Node) -> list[Problem]:
    """The violations of the schema in a config, in the order in which pydantic finds them.

    Not for configs that may have classes of plug-ins (`schema.OWN`): their names are unknown to the schema.
    """
    return list(_in_value(schema.of_config(), (), root, root))


def _in_value(allowed: Schema, path: PathParts, node: Node, root: Node) -> Iterator[Problem]:
    """The mistakes in the value `node` at `path`, which has one of the forms of a schema."""
    form = schema.form(allowed, node.value)
    if "oneOf" in form:
        yield from _in_class(schema.kinds(tuple(each["$ref"] for each in form["oneOf"])), path, node, root)
    elif WORDS in form:
        of_items: Schema = form.get("patternProperties", {})  # of a mapping of names to values
        if not schema.fits(node.plain(), {**form, "patternProperties": {pattern: {} for pattern in of_items}}):
            yield expected(path, root, form[WORDS])
        elif of_items and isinstance(node.value, dict):
            for key, item in node.value.items():
                yield from _in_value(next(iter(of_items.values())), (*path, key), item, root)
    elif form.get("type") == "array":
        if not isinstance(node.value, list):
            yield expected(path, root, A_LIST)
        elif not node.value and form.get("minItems"):
            yield expected(path, root, NOT_EMPTY)
        else:
            for i, item in enumerate(node.value):
                yield from _in_value(form["items"], (*path, i), item, root)
    elif form.get("type") == "object":
        if not isinstance(node.value, dict):
            yield expected(path, root, mapping(path))
        elif form.get("additionalProperties") is False:
            yield from _in_mapping(form, path, node.value, root)


def _in_mapping(form: Schema, path: PathParts, values: dict[str, Node], root: Node) -> Iterator[Problem]:
    """The mistakes in the keys and values of a section, or of the options of a class."""
    properties: dict[str, Schema] = form.get("properties", {})
    for key, allowed in properties.items():
        if key in values:
            yield from _in_value(allowed, (*path, key), values[key], root)
        elif key in form.get("required", ()):
            words = mapping((key,)) if "$ref" in allowed else allowed.get(WORDS) or allowed.get("description")
            yield missing((*path, key), root, words)
    for key in values:
        if key not in properties:
            yield unknown_key((*path, key), root, tuple(properties))


def _in_class(names: Sequence[str], path: PathParts, node: Node, root: Node) -> Iterator[Problem]:
    """The mistakes in a layer, loss or other class, of the family that has these names."""
    value = {EQUATIONS: node} if isinstance(node.value, list) and EQUATIONS in names else node.value
    kind = next(iter(value)) if isinstance(value, dict) and len(value) == 1 else value
    if not isinstance(kind, str):
        yield no_name(path, root, names)
    elif kind not in names:
        yield unknown_name(path, root, kind, names)
    else:
        options, path = schema.classes()[kind], (*path, kind)
        given = value[kind] if isinstance(value, dict) else Node(node.where)
        first = next(iter(options.get("properties", ())), None)
        if given.value is None or isinstance(given.value, dict):
            yield from _in_mapping(options, path, given.value or {}, root)
        elif first is None:
            yield expected(path, root, NO_OPTIONS)
        else:
            yield from _in_mapping(options, path, {first: given}, root)


def expected(path: PathParts, root: Node, words: str) -> Problem:
    """The problem of the value at `path`, in place of which `words` are expected."""
    path = without_names(path)
    where, value = _at(path, root)
    return Problem(where, dotted(path), f"found {found(value)}, expected {words}")


def missing(path: PathParts, root: Node, words: str | None) -> Problem:
    """The problem of the key at `path`, which a config must have; `words` say what it takes."""
    path = without_names(path)
    return Problem(root.find(path[:-1])[1], dotted(path), f"missing, expected {words or 'a value'}")


def unknown_key(path: PathParts, root: Node, names: Sequence[str]) -> Problem:
    """The problem of the unknown key at `path`, where `names` are known."""
    path = without_names(path)
    return _with_hint(root.find(path)[1], path, "unknown key", habits.of_key(path, root, names), names)


def unknown_name(path: PathParts, root: Node, name: str, names: Sequence[str]) -> Problem:
    """The problem of an unknown name of a class at `path`, where `names` are known."""
    family, node = family_of(path), root.find(path)[0]
    where = root.find((*path, name))[1] if isinstance(node.value, dict) else node.where
    if owner := next((kind for kind in names if name in (schema.options_of(kind) or ())), None):
        message = f"found the option {name}, expected the name of the {family} before it"
        hint: str | None = f"write for example {dotted((*path, owner, name))}"
    else:
        message = f"unknown {family} {found(name)}"
        hint = habits.of_name(name, names) or similar(name, names) or habits.of_class(node.plain(), names)
    return _with_hint(where, path, message, hint, names)


def no_name(path: PathParts, root: Node, names: Sequence[str]) -> Problem:
    """The problem of a value at `path` that has no name of a class, where `names` are known."""
    where, value = _at(path, root)
    given = [key for key in value if key in names] if isinstance(value, dict) else []
    indented = ", its options indented below its name" if len(given) == 1 else ""
    message = f"found {found(value)}, expected one {family_of(path)}{indented}"
    return _with_hint(where, path, message, habits.of_class(value, names), None if given else names)


def _at(path: PathParts, root: Node) -> tuple[str, object]:
    """The position and the value at `path`. A mapping or a list has the position of its key."""
    node, where = root.find(path)
    return where if isinstance(node.value, (dict, list)) else node.where, node.plain()


def _with_hint(where: str, path: PathParts, message: str, hint: str | None, names: Sequence[str] | None) -> Problem:
    """The problem with a hint; without one, with the names that are known, if these are given."""
    if hint is not None:
        return Problem(where, dotted(path), f"{message}; {hint}")
    return Problem(where, dotted(path), message, None if names is None else tuple(names))


def mapping(path: PathParts) -> str:
    """What the section at `path` takes, in words."""
    example = habits.EXAMPLES.get(dotted(path))
    return "a mapping of keys to values" if example is None else f"a mapping such as {example}"


def family_of(path: PathParts) -> str:
    """The family of the names of classes at `path`."""
    return next((FAMILY_AT[str(part)] for part in path if part in FAMILY_AT), "layer")


def without_names(path: PathParts) -> PathParts:
    """The path in a file, where a loss of equations is a list without the names of its class and of its option."""
    names = ("loss", EQUATIONS, "terms")
    return (names[0], *path[len(names) :]) if path[: len(names)] == names else path
