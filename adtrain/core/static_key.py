"""Static equality: when two values that are no arrays may share a Program, an equation, a kernel or a measured time.

Python's ``==`` is too weak for that: 1 == 1.0 == True, 0.0 == -0.0, Decimal("1.0") == Decimal("1.00"), and a dataclass
leaves out fields with ``compare=False``. A function can tell these apart. So can it tell two dicts of another order.
The repr of a value is too weak as well: it may be abbreviated, or leave out fields. Every cache of the package, in
memory or on a disk, has keys made here.

The structure of a tree is such a value too. A `Template` is a structure as compiled functions, for calls of jitted
functions.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np

from adtrain.core import tree
from adtrain.core.tree import TreeDef, flatten, of_fields, unflatten

BY_VALUE = frozenset({bool, int, str, bytes, type(None)})
"""The types whose equal values are the same value."""


class Identity:
    """An object as a key, which equals only that of the same object. It keeps the object alive."""

    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.x is self.x

    def __hash__(self) -> int:
        return object.__hash__(self.x)


def static_key(x: Any) -> Hashable:
    """A key that two values share only if they have the same type and consist of the same parts, in the same order.

    Floats are compared by their bits, functions and classes by identity. A tree or a dataclass consists of all its
    leaves or fields, and an object with a method ``static_parts`` of what that returns. Other objects with Python's
    default ``==`` are compared by identity. An object with a ``==`` of its own consists of what pickle would write; one
    that cannot be pickled is compared by its ``==``.

    Raises:
        TypeError: something in it is not hashable, and no list, dict, slice, dataclass or NumPy array.
    """
    kind = type(x)
    if kind in BY_VALUE:
        return kind, x
    rule = _RULES.get(kind)
    return (kind, *(_other(x) if rule is None else rule(x)))


def is_constant(key: Hashable) -> bool:
    """Whether the value of a key cannot change: it holds no list, dict, array, or dataclass that is not frozen."""
    if isinstance(key, tuple):
        return all(map(is_constant, key))
    if not isinstance(key, type):
        return True
    return not (issubclass(key, (list, dict, np.ndarray)) or tree.TreeDef(key).registered) and _is_frozen(key)


def params_key(params: Mapping[str, Any]) -> Hashable:
    """The key of an equation's parameters."""
    return tuple([(name, static_key(x)) for name, x in params.items()])


def lasting_text(x: Any) -> str:
    """The key of a value as a text that is the same in all processes.

    Raises:
        ValueError: the value has no such text: it holds an object that is compared by identity and is no function or
            class that a name in a module stands for.
    """
    return json.dumps(_lasting(static_key(x)), separators=(",", ":"))


def _float(x: float) -> tuple[Hashable, ...]:
    return (struct.pack("<d", x),)


def _dict(x: Mapping[Any, Any]) -> tuple[Hashable, ...]:
    return tuple([(static_key(key), static_key(value)) for key, value in x.items()])


def _items(x: Any) -> tuple[Hashable, ...]:
    return tuple(map(static_key, x))


def _array(x: np.ndarray) -> tuple[Hashable, ...]:
    if x.dtype.hasobject:
        raise TypeError("an array of Python objects")
    return x.dtype, x.shape, x.tobytes()


_RULES: dict[type, Callable[[Any], tuple[Hashable, ...]]] = {
    float: _float,
    complex: lambda x: _float(x.real) + _float(x.imag),
    tuple: _items,
    list: _items,
    dict: _dict,
    frozenset: _items,
    slice: lambda x: _items((x.start, x.stop, x.step)),
    type: lambda x: (Identity(x),),
    FunctionType: lambda x: (Identity(x),),
    Identity: lambda x: (x,),
    np.ndarray: _array,
}


def _other(x: Any) -> tuple[Hashable, ...]:
    """The key of a value of another type, without the type."""
    kind = type(x)
    if isinstance(x, np.dtype):
        return (x,)
    if isinstance(x, np.generic):
        return _array(np.asarray(x))
    if (parts := tree.parts(x)) is not None:
        return _items(parts)
    if hasattr(kind, "static_parts"):
        return _items(x.static_parts())
    by_identity = kind.__eq__ is object.__eq__  # type: ignore[comparison-overlap]
    if is_dataclass(kind) and not (by_identity and _is_frozen(kind)):
        return tuple([static_key(getattr(x, field.name)) for field in fields(kind)])
    if by_identity:
        return (Identity(x),)
    if not isinstance(x, (dict, list, tuple)):
        hash(x)
    try:
        made_of = x.__reduce_ex__(4)
        if isinstance(made_of, str):  # the name of x in its module
            return (Identity(x),)
        # After the first three come iterators over the items of a subclass of list or dict.
        made_of = [part if i < 3 or part is None else list(part) for i, part in enumerate(made_of)]
    except Exception:  # each type refuses to be pickled in its own way
        hash(x)
        return (x,)
    return _items(made_of)


def _is_frozen(kind: type) -> bool:
    """Whether a class is no dataclass, or one whose fields cannot be set."""
    return not is_dataclass(kind) or kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


def _lasting(key: Any) -> Any:
    """A key as JSON values."""
    if isinstance(key, tuple):
        return list(map(_lasting, key))
    if isinstance(key, Identity):
        key = key.x
    if isinstance(key, Enum):
        return [*_lasting(type(key)), key.name]
    if isinstance(key, (type, FunctionType)):
        module, name = key.__module__, key.__qualname__
        if module == "builtins" or _named(module, name) is key:  # a module need not have a name for a builtin type
            return [module, name]
    if isinstance(key, bytes):
        return [key.hex()]
    if isinstance(key, np.dtype) and key.isbuiltin == 1:
        return [key.str]
    if type(key) in BY_VALUE:
        return key
    raise ValueError(f"found an object of type {type(key).__name__}, expected one that is equal in all processes")


def _named(module: str, name: str) -> Any:
    """What a dotted name in a loaded module stands for, or None."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


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
