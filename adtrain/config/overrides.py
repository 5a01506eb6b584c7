"""Values set over those of a file: `training.epochs=3`, `model.layers.0.conv2d.out_channels=16`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NoReturn

from adtrain.config.problems import ConfigError, Problem, found, word
from adtrain.config.source import MAX_DEPTH, Node, read_value
from adtrain.config.specs import BY_KIND


def override(root: Node, settings: Sequence[str]) -> Node:
    """The tree with each `key=value` set, the last winning; keys are dotted, list items counted from 0.

    Raises ConfigError for one that is no `key=value` or leads nowhere; whether a key is known is not looked at here.
    """
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = re.sub(r"\[(\d+)\]", r".\1", key.strip())
        parts = key.split(".")
        if not (equals and len(parts) <= MAX_DEPTH and all(re.fullmatch(r"\w+", part) for part in parts)):
            _refuse(f"--set {word(setting)}", "found no key=value, expected one such as training.epochs=3")
        where = f"--set {key}"
        if not text.strip():
            _refuse(where, "found no value after the =, expected one (null for none)")
        root = _assigned(root, [], parts, read_value(text, where))
    return root


def _assigned(node: Node, done: list[str], parts: list[str], value: Node) -> Node:
    """A copy of `node` with `value` at `parts`; what is off the way is shared, as aliases share it."""
    if not parts:
        return value
    part, *rest = parts
    node = _long_form(node, done, part, value.where)
    if isinstance(node.value, list):
        index = int(part) if re.fullmatch("[0-9]{1,9}", part) else len(node.value)
        if index >= len(node.value):
            _refuse(value.where, f"found the index {part}, expected one from 0 to {len(node.value) - 1}")
        items = list(node.value)
        items[index] = _assigned(items[index], [*done, part], rest, value)
        return Node(node.where, items)
    if isinstance(node.value, dict):
        child = _assigned(node.value.get(part, Node(value.where)), [*done, part], rest, value)
        return Node(node.where, {**node.value, part: child}, {**node.key_where, part: value.where})
    _refuse(value.where, f"found {found(node.value)} at {'.'.join(done)}, which has no {part}")


def _long_form(node: Node, done: list[str], part: str, where: str) -> Node:
    """The node as a mapping where `part` needs one.

    `adam` becomes `adam: {}`, `linear: 128` becomes `linear: {out_features: 128}`, what is absent `{}`; a loss,
    optimizer or schedule other than the file's takes its place.
    """
    if node.value == part:
        return Node(node.where, {part: Node(node.where)}, {part: node.where})
    has_part = isinstance(node.value, dict) and part in node.value
    if node.value is None or (done in (["loss"], ["optimizer"], ["schedule"]) and not has_part):
        return Node(where, {})
    spec = BY_KIND.get(done[-1]) if done else None
    is_way_on = isinstance(node.value, dict) or (isinstance(node.value, list) and part.isdecimal())
    if spec and not is_way_on and (first := spec.first_option()):
        return Node(node.where, {first: node}, {first: node.where})
    return node


def _refuse(where: str, message: str) -> NoReturn:
    raise ConfigError([Problem(where, "", message)])
