"""A compiled function as JSON: its Program, the structure of its result, and its kernels and memory plan.

The format has no code. A value is a JSON scalar, or a list that begins with its kind: `_Reader.value` and `_KINDS` have
them all. Variables, equations and Programs have numbers, because they are compared by identity. Long texts are written
once. Classes are dataclasses, named tuples and enumerations of loaded modules of the package, by name. The reader
imports nothing, and gives a dataclass its fields without a call of its constructor.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

import numpy as np

from adtrain.core.array import Array, array
from adtrain.core.primitive import PRIMITIVES, Primitive
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.tree import of_fields
from adtrain.core.types import ArrayType

LONG = 40
"""Characters from which on a text is written once, and then by its number."""

SCALARS = frozenset({type(None), bool, int, str})
COLLECTIONS: dict[str, type] = {kind.__name__: kind for kind in (tuple, list, set, frozenset)}
TREES: dict[str, type] = {kind.__name__: kind for kind in (dict, list, tuple, type(None))}
"""The classes that the structure of a result may name besides those of the package."""


def encoded(value: Any) -> bytes:
    """A value as JSON.

    Raises:
        TypeError: it holds an object that the format does not have, such as a function.
    """
    return _Writer().document(value)


def decoded(content: bytes) -> Any:
    """The value of a document that `encoded` made. Of another document, an exception of any type or another value."""
    return _Reader(json.loads(content)).found


class _Writer:
    """Writes one document. `nodes` has equations and Programs, each after those that it refers to."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self.types: dict[tuple[ArrayType, str, int], int] = {}
        self.variables: dict[Variable, int] = {}
        self.nodes: list[Any] = []
        self.numbers: dict[Equation | Program, int] = {}
        self.classes: dict[type, int] = {}

    def document(self, value: Any) -> bytes:
        found = self.value(value)
        types = [[t.dtype.name, *t.shape, device, members] for t, device, members in self.types]
        variables = [self.types[v.type, v.device, v.members] for v in self.variables]
        classes = [[kind.__module__, kind.__qualname__, *_fields(kind)] for kind in self.classes]
        document = [list(self.texts), types, variables, classes, self.nodes, found]
        return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()

    def value(self, x: Any) -> Any:
        kind: Any = type(x)
        if kind is str and len(x) >= LONG:
            return ["text", self.texts.setdefault(x, len(self.texts))]
        if kind in SCALARS:
            return x
        if kind is float:
            return ["float", x.hex()]
        if kind is Variable:
            return ["variable", self.variable(x)]
        if kind is Equation or kind is Program:
            return ["node", self.node(x)]
        if kind.__name__ in COLLECTIONS and COLLECTIONS[kind.__name__] is kind:
            return [kind.__name__, *map(self.value, x)]
        if kind is dict:
            return ["dict", *(self.value(part) for item in x.items() for part in item)]
        if isinstance(x, np.dtype):
            return ["dtype", x.name]
        if isinstance(x, Primitive):
            return ["primitive", x.name]
        if isinstance(x, Array):
            return ["array", x.dtype.name, x.device, x.numpy().tobytes().hex(), *x.shape]
        if isinstance(x, type):
            return ["class", x.__name__ if x in TREES.values() else self.class_number(x)]
        if isinstance(x, Enum):
            return ["member", self.class_number(kind), x.name]
        names = _fields(kind)
        return ["object", self.class_number(kind), *(self.value(getattr(x, name)) for name in names)]

    def variable(self, v: Variable) -> int:
        self.types.setdefault((v.type, v.device, v.members), len(self.types))
        return self.variables.setdefault(v, len(self.variables))

    def node(self, x: Equation | Program) -> int:
        if x not in self.numbers:
            made = self._equation(x) if isinstance(x, Equation) else self._program(x)
            self.numbers[x] = len(self.nodes)
            self.nodes.append(made)
        return self.numbers[x]

    def _equation(self, e: Equation) -> list[Any]:
        params = [[name, self.value(x)] for name, x in e.params.items()]
        ends = [list(map(self.variable, vs)) for vs in (e.inputs, e.outputs)]
        return ["equation", e.primitive.name, *ends, params, e.scope, e.phase]

    def _program(self, p: Program) -> list[Any]:
        equations = list(map(self.node, p.equations))
        constants = [[self.variable(v), self.value(x)] for v, x in p.constants.items()]
        ends = [list(map(self.variable, vs)) for vs in (p.inputs, p.outputs, p.donated_inputs)]
        return ["program", constants, equations, *ends]

    def class_number(self, kind: type) -> int:
        if _named(kind.__module__, kind.__qualname__) is not kind:
            raise TypeError(f"{kind.__qualname__} has no name in its module")
        return self.classes.setdefault(kind, len(self.classes))


@cache
def _dtype(name: str) -> np.dtype:
    return np.dtype(name)


class _Reader:
    """Reads one document."""

    def __init__(self, document: Any) -> None:
        self.texts, types, variables, classes, nodes, found = document
        types = [(ArrayType(tuple(shape), _dtype(name)), device, members) for name, *shape, device, members in types]
        self.variables = [Variable(*types[i]) for i in variables]
        self.classes = [_class(*each) for each in classes]
        self.makers = list(map(_maker, self.classes))
        self.nodes: list[Any] = []
        for kind, *parts in nodes:
            self.nodes.append(self._equation(*parts) if kind == "equation" else self._program(*parts))
        self.found = self.value(found)

    def value(self, x: Any) -> Any:
        if x.__class__ is not list:
            return x
        kind = x[0]
        if kind == "variable":
            return self.variables[x[1]]
        if kind == "object":
            return self.makers[x[1]]([self.value(part) for part in x[2:]])
        if kind in COLLECTIONS:
            return COLLECTIONS[kind](map(self.value, x[1:]))
        return _KINDS[kind](self, *x[1:])

    def _equation(self, name: str, inputs: list[int], outputs: list[int], params: Any, scope: str, phase: str) -> Any:
        at, value = self.variables.__getitem__, self.value
        made = {key: x if x.__class__ is not list else value(x) for key, x in params}
        return Equation(PRIMITIVES[name], tuple(map(at, inputs)), made, tuple(map(at, outputs)), scope, phase)

    def _program(self, constants: Any, equations: Any, inputs: Any, outputs: Any, donated: Any) -> Program:
        at = self.variables.__getitem__
        known = {at(v): self.value(x) for v, x in constants}
        listed = tuple(map(self.nodes.__getitem__, equations))
        ends = tuple(map(at, inputs)), known, listed, tuple(map(at, outputs))
        return Program(*ends, frozenset(map(at, donated)))

    def _dict(self, *parts: Any) -> dict[Any, Any]:
        values = iter(map(self.value, parts))
        return dict(zip(values, values, strict=True))

    def _array(self, name: str, device: str, elements: str, *shape: int) -> Array:
        return array(np.frombuffer(bytes.fromhex(elements), _dtype(name)).reshape(shape), device=device)


_KINDS: dict[str, Callable[..., Any]] = {
    "text": lambda reader, i: reader.texts[i],
    "float": lambda _, x: float.fromhex(x),
    "node": lambda reader, i: reader.nodes[i],
    "dict": _Reader._dict,
    "dtype": lambda _, name: _dtype(name),
    "primitive": lambda _, name: PRIMITIVES[name],
    "array": _Reader._array,
    "class": lambda reader, x: TREES[x] if isinstance(x, str) else reader.classes[x],
    "member": lambda reader, i, name: reader.classes[i][name],
}


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """The names of the fields of a dataclass or a named tuple; none for an enumeration."""
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return tuple(kind._fields)
    if issubclass(kind, Enum):
        return ()
    raise TypeError(f"{kind.__qualname__} is no dataclass, named tuple or enumeration")


def _class(module: str, name: str, *names: str) -> type:
    """The class of a name, whose fields have these names."""
    kind = _named(module, name)
    if not isinstance(kind, type) or _fields(kind) != names:
        raise ValueError(f"{module}.{name} is not the class that was written")
    return kind


def _maker(kind: type) -> Callable[[list[Any]], Any]:
    """From the values of the fields of a class to an instance."""
    if hasattr(kind, "_make"):
        return kind._make

    def made(values: list[Any]) -> Any:
        if len(values) != len(_fields(kind)):
            raise ValueError(f"found {len(values)} fields of a {kind.__qualname__}, expected {len(_fields(kind))}")
        return of_fields(kind, _fields(kind), values)

    return made


def _named(module: str, name: str) -> Any:
    """What a loaded module of the package has under a name, or None."""
    return getattr(sys.modules[module], name, None) if module.partition(".")[0] == "adtrain" else None
