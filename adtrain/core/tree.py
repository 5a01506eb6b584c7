"""Trees: nested dicts, lists, tuples, named tuples, dataclasses, registered classes and None.

Everything else is a leaf. Dicts with the same keys in another order have the same structure. Two kinds of dataclasses
are leaves: layers and optimizers, whose fields are options, and those with ``__array__``, which stand for one array.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

from adtrain.core.errors import AdtrainError, ShapeError


class _Registered(NamedTuple):
    """How a class is taken apart and put together."""

    flatten: Callable[[Any], tuple[Sequence[Any], Hashable]]
    unflatten: Callable[[Any, Sequence[Any]], Any]


_registered: dict[type, _Registered] = {}


def register(
    kind: type,
    flatten: Callable[[Any], tuple[Sequence[Any], Hashable]],
    unflatten: Callable[[Any, Sequence[Any]], Any],
) -> None:
    """Make the instances of a class trees, in all functions of adtrain.

    Args:
        kind: the class; its subclasses are registered by themselves.
        flatten: takes an instance and returns its children, which are trees, and the rest of it as a hashable value.
        unflatten: takes that value and children, and returns an instance.

    Raises:
        AdtrainError: the class is registered already, or is a dict, list, tuple or None.
    """
    if kind in _registered or kind in (dict, list, tuple, type(None)):
        raise AdtrainError(f"tree.register: {kind.__name__} is a tree already")
    _registered[kind] = _Registered(flatten, unflatten)


def parts(x: Any) -> tuple[Sequence[Any], Hashable] | None:
    """The children of an instance of a registered class and the rest of it; None for other values."""
    registered = _registered.get(type(x))
    return None if registered is None else registered.flatten(x)


@dataclass(frozen=True)
class TreeDef:
    """The structure of a tree without its leaves. ``kind`` is None for a leaf.

    Attributes:
        keys: of a dict its keys, of a dataclass its field names; of others empty.
        children: the structures below; of a dict in the order of its keys.
        data: of a registered class what its ``flatten`` returned besides the children.
    """

    kind: type | None
    keys: tuple[Any, ...] = ()
    children: tuple[TreeDef, ...] = ()
    data: Hashable = None

    @property
    def leaf_count(self) -> int:
        return 1 if self.kind is None else sum(child.leaf_count for child in self.children)

    @property
    def registered(self) -> bool:
        """Whether a registered class is part of it."""
        return self.kind in _registered or any(child.registered for child in self.children)

    def __str__(self) -> str:
        if self.kind is None:
            return "*"
        if self.kind is dict:
            return "{" + ", ".join(f"{k!r}: {c}" for k, c in zip(self.keys, self.children, strict=True)) + "}"
        names = [f"{key}=" for key in self.keys] or [""] * len(self.children)
        return f"{self.kind.__name__}({', '.join(f'{n}{c}' for n, c in zip(names, self.children, strict=True))})"


_LEAF = TreeDef(None)


def flatten(tree: Any) -> tuple[list[Any], TreeDef]:
    """The leaves, depth first (dicts in insertion order), and the structure for `unflatten`."""
    found: list[Any] = []
    return found, _flatten(tree, found)


def _flatten(tree: Any, found: list[Any]) -> TreeDef:
    kind: Any = type(tree)
    if isinstance(tree, dict):
        return TreeDef(dict, tuple(tree), tuple(_flatten(child, found) for child in tree.values()))
    if kind in _registered:
        children, data = _registered[kind].flatten(tree)
        return TreeDef(kind, (), tuple(_flatten(child, found) for child in children), data)
    if isinstance(tree, (list, tuple)):
        return TreeDef(kind, (), tuple(_flatten(child, found) for child in tree))
    if tree is None:
        return TreeDef(type(None))
    if _is_tree_of_fields(kind):
        names = tuple(field.name for field in fields(tree))
        return TreeDef(kind, names, tuple(_flatten(getattr(tree, name), found) for name in names))
    found.append(tree)
    return _LEAF


@cache
def _is_tree_of_fields(kind: type) -> bool:
    """Whether ``kind`` is a dataclass whose instances are trees: no array, and without the attribute ``tree_leaf``."""
    return is_dataclass(kind) and not hasattr(kind, "__array__") and not getattr(kind, "tree_leaf", False)


def flatten_like(treedef: TreeDef, tree: Any) -> list[Any] | None:
    """The leaves of ``tree`` in the order of ``treedef``; None if it has another structure."""
    found, structure = flatten(tree)
    return found if structure == treedef else _in_order(treedef, structure, found)


def _in_order(treedef: TreeDef, structure: TreeDef, leaves: list[Any]) -> list[Any] | None:
    """The leaves of a tree of ``structure`` in the order of ``treedef``; None if not only the order of keys differs."""
    if (treedef.kind, treedef.data, len(treedef.children)) != (structure.kind, structure.data, len(structure.children)):
        return None
    if treedef.kind is None:
        return leaves
    return _by_child(_in_order, treedef, structure, leaves)


def _by_child(
    ordered: Callable[..., list[Any] | None], treedef: TreeDef, structure: TreeDef, leaves: list[Any]
) -> list[Any] | None:
    """``ordered`` of each child of ``treedef`` with the child of the same key in ``structure``, and its leaves."""
    remaining = iter(leaves)
    keys = structure.keys or range(len(structure.children))
    parts = {
        key: (child, list(islice(remaining, child.leaf_count)))
        for key, child in zip(keys, structure.children, strict=True)
    }
    found: list[Any] = []
    for key, child in zip(treedef.keys or range(len(treedef.children)), treedef.children, strict=True):
        part = ordered(child, *parts[key]) if key in parts else None
        if part is None:
            return None
        found += part
    return found


def spread_prefix(prefix: Any, treedef: TreeDef) -> list[Any] | None:
    """For each leaf of ``treedef`` the leaf of ``prefix`` at its place or above it, None where that is a None.

    ``prefix`` is a tree in which leaves or None may stand for whole branches of ``treedef``. The result is None if it
    has another structure.
    """
    leaves, structure = flatten(prefix)
    return _spread(treedef, structure, leaves)


def _spread(treedef: TreeDef, prefix: TreeDef, leaves: list[Any]) -> list[Any] | None:
    if prefix.kind in (None, type(None)):
        return (leaves or [None]) * treedef.leaf_count
    if (treedef.kind, treedef.data, len(treedef.children)) != (prefix.kind, prefix.data, len(prefix.children)):
        return None
    return _by_child(_spread, treedef, prefix, leaves)


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
    if treedef.kind in _registered:
        return _registered[treedef.kind].unflatten(treedef.data, children)
    if hasattr(treedef.kind, "_fields"):
        return treedef.kind(*children)
    return of_fields(treedef.kind, treedef.keys, children) if is_dataclass(treedef.kind) else treedef.kind(children)


def of_fields(kind: type, names: Sequence[str], values: Sequence[Any]) -> Any:
    """An instance of a dataclass. Its constructor is not called: it may check or convert what tracers do not have."""
    made: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def map(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply ``function`` to corresponding leaves of trees with the same structure.

    Raises:
        ShapeError: the structures differ.
    """
    first, treedef = flatten(tree)
    columns = [first]
    for other in rest:
        found = flatten_like(treedef, other)
        if found is None:
            raise ShapeError(f"tree.map: found trees of different structure: {treedef} and {flatten(other)[1]}")
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
