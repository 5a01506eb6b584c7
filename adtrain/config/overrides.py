"""Values given for keys of a config: `training.epochs=3`, `model.layers.0.conv2d.out_channels=16`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias, cast

from adtrain.config import schema
from adtrain.config.problems import ConfigError, Problem, found, key_text, known
from adtrain.config.source import MAX_DEPTH, Node, of_python, read_value

Overrides: TypeAlias = Sequence[str] | Mapping[str, Any]
"""Settings `key=value` of the command line, or values of Python by their keys."""

REPLACED = ("loss", "optimizer", "schedule")
"""Sections in which `--set optimizer.sgd.lr=0.1` replaces an optimizer of another name."""

ALTERNATIVES = {"data.path": "dataset", "data.dataset": "path"}
"""From a key to the key of its section that it replaces: a config has one of them."""


def override(root: Node, settings: Overrides) -> Node:
    """A copy of the tree with each setting applied in order. Keys are dotted; list indices count from 0.

    Raises ConfigError for a setting that is not `key=value`, or for a path that does not exist. Unknown keys are not
    refused here.
    """
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            if not isinstance(key, str) or (parts := parts_of(key)) is None:
                _refuse("overrides", f"found the key {found(key)}, expected one such as training.epochs")
            root = _with_value(root, [], parts, of_python(value, "overrides", tuple(parts)))
        return root
    for setting in settings:
        key, equals, text = setting.partition("=")
        parts = parts_of(key)
        if not equals or parts is None:
            _refuse(f"--set {key_text(setting)}", "found no key=value, expected one such as training.epochs=3")
        where = f"--set {'.'.join(parts)}"
        if not text:
            _refuse(where, "found no value after the =, expected one (null for none)")
        root = _with_value(root, [], parts, read_value(text, where))
    return root


def parts_of(key: str) -> list[str] | None:
    """The parts of a dotted key; None if it is none."""
    parts = re.sub(r"\[(\d+)\]", r".\1", key.strip()).split(".")
    return parts if len(parts) <= MAX_DEPTH and all(re.fullmatch(r"\w+", part) for part in parts) else None


def with_nodes(root: Node, values: Mapping[str, Node]) -> Node:
    """A copy of the tree with each value at its dotted key. Raises ConfigError as `override` does.

    A value of `optimizer` is set before one of `optimizer.sgd.lr`, in whatever order they are given. Also raises
    ConfigError where a key such as `optimizer.sgd.lr` would replace an optimizer of another name, or where a key would
    replace a part of the value of another one.
    """
    for key, node in sorted(values.items(), key=lambda item: len(parts_of(item[0]) or ())):
        section, *rest = parts = parts_of(key) or [""]
        assert isinstance(root.value, dict)
        if section in REPLACED and rest and not _is_item(root.value.get(section, root), rest[0]):
            present = root.value[section].value if section in root.value else None
            own = next(iter(present), None) if isinstance(present, dict) else present
            if own not in (None, rest[0]):
                from adtrain.config.specs import FAMILIES

                if rest[0] not in FAMILIES[section]:
                    hint = known(rest[0], FAMILIES[section])
                    _refuse(node.where, f"{key}: unknown {section} {found(rest[0])}; {hint}")
                both = f"to train with both, sweep {section}: [{own}, {rest[0]}] with their options"
                _refuse(node.where, f"{key}: found {rest[0]}, expected {own}, the config's {section}; {both}")
        root = _with_value(root, [], parts, node)
    for key, node in values.items():
        parts = parts_of(key) or []
        if not _is_used(node, _at(root, parts)):
            other = next(x for x in values if x != key and _same(parts, parts_of(x) or []))
            message = f"{key}: found {found(node.plain())}, which {other} replaces; expected one of the two"
            _refuse(node.where, message)
    return root


def _at(root: Node, parts: Sequence[str]) -> Node:
    """The node at a dotted key, which has been set."""
    for part in parts:
        root = root.value[int(part)] if isinstance(root.value, list) else cast(dict[str, Node], root.value)[part]
    return root


def _same(parts: Sequence[str], longer: Sequence[str]) -> bool:
    """Whether a key is the beginning of another one; "00" is the index "0"."""
    short, other = ([int(x) if x.isdecimal() else x for x in each] for each in (parts, longer))
    return other[: len(short)] == short


def _is_used(value: Node, present: Node) -> bool:
    """Whether all of a value that was set is in what is `present` at its key."""
    if value is present or value.value is None:
        return True
    if isinstance(value.value, dict):
        into = present.value if isinstance(present.value, dict) else {}
        return all(key in into and _is_used(child, into[key]) for key, child in value.value.items())
    if isinstance(value.value, list):
        items = present.value if isinstance(present.value, list) else []
        return len(items) == len(value.value) and all(map(_is_used, value.value, items))
    # A name whose options another key sets, or the first option of a layer beside others: see `_long_form`.
    return isinstance(present.value, dict) and (
        value.value in present.value or any(child is value for child in present.value.values())
    )


def without(root: Node, key: str) -> Node:
    """A copy of a mapping without `key`."""
    assert isinstance(root.value, dict)
    return Node(root.where, {name: node for name, node in root.value.items() if name != key}, root.key_where)


def _with_value(node: Node, prefix: list[str], parts: list[str], value: Node) -> Node:
    """A copy of `node`, which is at `prefix`, with `value` at `parts` below it; all other nodes are shared."""
    if not parts:
        return value
    part, *rest = parts
    node = _long_form(node, prefix, part, value.where)
    if isinstance(node.value, list):
        index = int(part) if re.fullmatch("[0-9]{1,9}", part) else len(node.value)
        if index >= len(node.value):
            _refuse(value.where, f"found the index {part}, expected one from 0 to {len(node.value) - 1}")
        items = list(node.value)
        items[index] = _with_value(items[index], [*prefix, part], rest, value)
        return Node(node.where, items)
    if isinstance(node.value, dict):
        child = _with_value(node.value.get(part, Node(value.where)), [*prefix, part], rest, value)
        where = node.key_where[part] if rest and part in node.key_where else value.where
        values = dict(node.value)
        if child.value is not None:
            values.pop(ALTERNATIVES.get(".".join([*prefix, part]), ""), None)
        return Node(node.where, {**values, part: child}, {**node.key_where, part: where})
    _refuse(value.where, f"found {found(node.value)} at {'.'.join(prefix)}, which has no {part}")


def _long_form(node: Node, prefix: list[str], part: str, where: str) -> Node:
    """The node as a mapping, if `part` is a key below it.

    `adam` becomes `adam: {}`, `linear: 128` becomes `linear: {out_features: 128}`, and an absent value becomes `{}`. If
    `part` names another loss, optimizer or schedule than the file's, the result is `{}`, so that it replaces the
    file's.
    """
    if node.value == part:
        return Node(node.where, {part: Node(node.where)}, {part: node.where})
    has_part = part in node.value if isinstance(node.value, dict) else _is_item(node, part)
    if node.value is None or (prefix in ([name] for name in REPLACED) and not has_part):
        return Node(where, {})
    has_children = isinstance(node.value, dict) or (isinstance(node.value, list) and part.isdecimal())
    # The first option of a layer, loss or other class is the one that `kind: value` sets.
    first = next(iter(schema.options_of(prefix[-1]) or ()), None) if prefix and not has_children else None
    return node if first is None else Node(node.where, {first: node}, {first: node.where})


def _is_item(node: Node, part: str) -> bool:
    """Whether `part` is the index of an item: of an equation in a loss."""
    return isinstance(node.value, list) and part.isdecimal()


def _refuse(where: str, message: str) -> NoReturn:
    raise ConfigError([Problem(where, "", message)])
