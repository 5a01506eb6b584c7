"""Template: the structure of a tree as compiled functions, for calls of jitted functions."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any

from adtrain.core.static_key import BY_VALUE, static_key
from adtrain.core.tree import TreeDef, flatten, of_fields, unflatten


class Template:
    """`flatten` and `unflatten` for one structure, each compiled to a Python expression for speed.

    The structure of a tree is the same if the `static_key` is: dicts have the same keys, in the same order.
    """

    def __init__(self, treedef: TreeDef) -> None:
        keys = list(_dict_keys(treedef))
        if treedef.registered or not BY_VALUE.issuperset(map(type, keys)):
            self._flatten = partial(_flatten_same, static_key(treedef))
            self._unflatten = partial(unflatten, treedef)
            return
        self._names: dict[str, Any] = {"__builtins__": {"type": type, "len": len, "map": map}}
        self._checks: list[str] = []
        self._leaves: list[str] = []
        self._dicts: list[str] = []
        built = self._write(treedef, "tree")
        if keys:
            found = f"[{', '.join(f'*{place}' for place in self._dicts)}]"
            types = self._name(list(map(type, keys)))
            self._checks += [f"(keys := {found}) == {self._name(keys)}", f"[*map(type, keys)] == {types}"]
        check, leaves = " and ".join(self._checks) or "True", ", ".join(self._leaves)
        self._flatten = eval(f"lambda tree: [{leaves}] if {check} else None", self._names)
        self._unflatten = eval(f"lambda leaves: {built}", self._names)

    def flatten(self, tree: Any) -> list[Any] | None:
        """The leaves of ``tree``; None if it has another structure."""
        try:
            leaves: list[Any] | None = self._flatten(tree)
        except (KeyError, AttributeError):
            return None
        return leaves

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """The tree with these ``leaves``."""
        return self._unflatten(leaves)

    def _write(self, treedef: TreeDef, place: str) -> str:
        """The expression that builds a tree from ``leaves``. Adds the checks and leaves of the tree at ``place``."""
        kind, children = treedef.kind, treedef.children
        if kind is None:
            self._leaves.append(place)
            return f"leaves[{len(self._leaves) - 1}]"
        kind_name = self._name(kind)
        self._checks.append(f"type({place}) is {kind_name}")
        if kind is type(None):
            return "None"
        if is_dataclass(kind):
            parts = [self._write(child, f"{place}.{key}") for key, child in zip(treedef.keys, children, strict=True)]
            build = self._name(partial(of_fields, kind, treedef.keys))
            return f"{build}([{', '.join(parts)}])"
        self._checks.append(f"len({place}) == {len(children)}")
        keys = [self._name(key) for key in (treedef.keys if kind is dict else range(len(children)))]
        parts = [self._write(child, f"{place}[{key}]") for key, child in zip(keys, children, strict=True)]
        if kind is dict:
            self._dicts.append(place)
            return "{" + ", ".join(f"{key}: {part}" for key, part in zip(keys, parts, strict=True)) + "}"
        listed = "".join(f"{part}, " for part in parts)
        return f"{kind_name}({listed})" if hasattr(kind, "_fields") else f"{kind_name}(({listed}))"

    def _name(self, value: Any) -> str:
        name = f"n{len(self._names)}"
        self._names[name] = value
        return name


def _dict_keys(treedef: TreeDef) -> Iterator[Any]:
    """The keys of all dicts, each dict after those in it."""
    for child in treedef.children:
        yield from _dict_keys(child)
    if treedef.kind is dict:
        yield from treedef.keys


def _flatten_same(key: Hashable, tree: Any) -> list[Any] | None:
    """The leaves of ``tree``; None if its structure has another key."""
    found, structure = flatten(tree)
    return found if static_key(structure) == key else None
