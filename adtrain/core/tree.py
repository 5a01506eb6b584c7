"""Trees: nested dicts, lists, tuples, named tuples and None. Everything else is a leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from adtrain.core.errors import ShapeError


@dataclass(frozen=True)
class TreeDef:
    """The structure of a tree without its leaves. ``kind`` is None for a leaf."""

    kind: type | None
    keys: tuple[Any, ...] = ()
    children: tuple[TreeDef, ...] = ()

    @property
    def leaf_count(self) -> int:
        return 1 if self.kind is None else sum(child.leaf_count for child in self.children)

    def __str__(self) -> str:
        if self.kind is None:
            return "*"
        if self.kind is dict:
            return "{" + ", ".join(f"{k!r}: {c}" for k, c in zip(self.keys, self.children, strict=True)) + "}"
        return f"{self.kind.__name__}({', '.join(map(str, self.children))})"


_LEAF = TreeDef(None)


def flatten(tree: Any) -> tuple[list[Any], TreeDef]:
    """The leaves, depth first (dicts in insertion order), and the structure for `unflatten`."""
    found: list[Any] = []
    return found, _flatten(tree, found)


def _flatten(tree: Any, found: list[Any]) -> TreeDef:
    if isinstance(tree, dict):
        return TreeDef(dict, tuple(tree), tuple(_flatten(child, found) for child in tree.values()))
    if isinstance(tree, (list, tuple)):
        return TreeDef(type(tree), (), tuple(_flatten(child, found) for child in tree))
    if tree is None:
        return TreeDef(type(None))
    found.append(tree)
    return _LEAF


def unflatten(treedef: TreeDef, leaves: Sequence[Any]) -> Any:
    """The tree of structure ``treedef`` with ``leaves`` in the order of `flatten`."""
    return _unflatten(treedef, iter(leaves))


def _unflatten(treedef: TreeDef, leaves: Iterator[Any]) -> Any:
    if treedef.kind is None:
        return next(leaves)
    if treedef.kind is type(None):
        return None
    children = [_unflatten(child, leaves) for child in treedef.children]
    if treedef.kind is dict:
        return dict(zip(treedef.keys, children, strict=True))
    if hasattr(treedef.kind, "_fields"):
        return treedef.kind(*children)
    return treedef.kind(children)


class Template:
    """`flatten` and `unflatten` for one structure, each compiled to a Python expression for speed."""

    def __init__(self, treedef: TreeDef) -> None:
        self._names: dict[str, Any] = {"__builtins__": {"type": type, "len": len}}
        self._checks: list[str] = []
        self._leaves: list[str] = []
        built = self._write(treedef, "tree")
        check, leaves = " and ".join(self._checks) or "True", ", ".join(self._leaves)
        self._flatten = eval(f"lambda tree: [{leaves}] if {check} else None", self._names)
        self._unflatten = eval(f"lambda leaves: {built}", self._names)

    def flatten(self, tree: Any) -> list[Any] | None:
        """The leaves of ``tree``; None if it has another structure."""
        try:
            leaves: list[Any] | None = self._flatten(tree)
        except KeyError:
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
        self._checks.append(f"len({place}) == {len(children)}")
        keys = [self._name(key) for key in (treedef.keys if kind is dict else range(len(children)))]
        parts = [self._write(child, f"{place}[{key}]") for key, child in zip(keys, children, strict=True)]
        if kind is dict:
            return "{" + ", ".join(f"{key}: {part}" for key, part in zip(keys, parts, strict=True)) + "}"
        listed = "".join(f"{part}, " for part in parts)
        return f"{kind_name}({listed})" if hasattr(kind, "_fields") else f"{kind_name}(({listed}))"

    def _name(self, value: Any) -> str:
        name = f"n{len(self._names)}"
        self._names[name] = value
        return name


def map(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply ``function`` to corresponding leaves of trees with the same structure.

    Raises:
        ShapeError: the structures differ.
    """
    first, treedef = flatten(tree)
    columns = [first]
    for other in rest:
        found, structure = flatten(other)
        if structure != treedef:
            raise ShapeError(f"tree.map: found trees of different structure: {treedef} and {structure}")
        columns.append(found)
    return unflatten(treedef, [function(*row) for row in zip(*columns, strict=True)])


def leaves(tree: Any) -> list[Any]:
    """The leaves in the order of `flatten`."""
    return flatten(tree)[0]


def paths(tree: Any) -> list[str]:
    """The path of each leaf in the order of `flatten`: keys, field names and positions, joined by dots."""
    return list(_paths(flatten(tree)[1], ()))


def _paths(treedef: TreeDef, prefix: tuple[str, ...]) -> Iterator[str]:
    if treedef.kind is None:
        yield ".".join(prefix)
        return
    names: Iterable[Any] = treedef.keys or getattr(treedef.kind, "_fields", None) or range(len(treedef.children))
    for name, child in zip(names, treedef.children, strict=True):
        yield from _paths(child, (*prefix, str(name)))
