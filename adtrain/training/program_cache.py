"""The Programs of a training in the user's cache, with their kernels and memory plans: a second run traces nothing.

The key of a Program holds all that it depends on: the sources of the package, the config, what the data add to the
network, the types of the arguments, and the device. An entry that cannot be read is deleted, and made again.

An entry is a compiled function as JSON: its Program, the structure of its result, and its kernels and memory plan.

The format has no code. A value is a JSON scalar, or a list that begins with its kind: `_Reader.value` and `_KINDS` have
them all. Variables, equations and Programs have numbers, because they are compared by identity. Long texts are written
once. Classes are dataclasses, named tuples and enumerations of loaded modules of the package, by name. The reader
imports nothing, and gives a dataclass its fields without a call of its constructor.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from adtrain.cache import digest, open_cache
from adtrain.config.specs import Spec
from adtrain.core.array import Array, array
from adtrain.core.errors import AdtrainError
from adtrain.core.primitive import PRIMITIVES, Primitive
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.static_key import lasting_text
from adtrain.core.tree import TreeDef, of_fields
from adtrain.core.types import ArrayType
from adtrain.files import asset_path

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


KIND, SUFFIX = "programs", ".json"

_log = logging.getLogger(__name__)


class PersistentProgramCache:
    """The cached Programs of one function; a `core.staging.ProgramCache`.

    An entry is a digest of its key and its document, and the document in a second line. So an entry
    that was stored under another key, or that something else has written, is not used.

    Args:
        key_parts: all values that the function depends on. The sources of the package are added.

    Raises:
        ValueError: a part has no `lasting_text`.
    """

    def __init__(self, *key_parts: object) -> None:
        self.function_key = digest(source_digest(), sys.version, np.__version__, lasting_text(key_parts))

    def find(self, key: Any) -> tuple[Program, TreeDef, Any] | None:
        """What is stored under the key, or None. An entry that `store` has not written is deleted with a warning."""
        if (name := self._name(key)) is None:
            return None
        cache = open_cache(KIND)
        if (content := cache.content(name, SUFFIX)) is None:
            return None
        mark, _, document = bytes(content).partition(b"\n")
        try:
            if mark != _mark(name, document):
                raise ValueError("its digest does not match")
            program, result, lowered = decoded(document)
            if not (isinstance(program, Program) and isinstance(result, TreeDef)):
                raise ValueError("it holds no Program")
        except Exception as error:  # damaged content can raise any exception
            _log.warning("adtrain: warning: a cached Program cannot be read (%s); it is traced again", error)
            cache.remove(name, SUFFIX)
            return None
        return program, result, lowered

    def store(self, key: Any, program: Program, result: TreeDef, lowered: Any) -> None:
        """Store what `find` returns. A value that the format does not have, such as a function, is not stored."""
        cache, name = open_cache(KIND), self._name(key)
        if name is None or not cache.lasting:
            return
        try:
            document = encoded((program, result, lowered))
        except (TypeError, RecursionError):
            return
        with suppress(AdtrainError, OSError):  # a full disk: the next run traces again
            cache.store(name, SUFFIX, _mark(name, document) + b"\n" + document)
            cache.prune()

    def _name(self, key: Any) -> str | None:
        """The key of the file; None for a key that is another one in another process."""
        try:
            return digest(self.function_key, lasting_text(key))
        except ValueError:
            return None


def _mark(name: str, document: bytes) -> bytes:
    return hashlib.sha256(name.encode() + document).hexdigest().encode()


@functools.cache
def source_digest() -> str:
    """A digest of the names, sizes and modification times of all files of the package and of its kernels."""
    files = []
    for root in (Path(__file__).parent.parent, asset_path("kernels")):
        for folder, _, names in os.walk(root):
            for name in names:
                if name.endswith((".py", ".c", ".h", ".cu", ".cuh")):
                    path = os.path.join(folder, name)
                    status = os.stat(path)
                    files.append(f"{path} {status.st_size} {status.st_mtime_ns}")
    return digest(*sorted(files))


def targets(value: Any) -> Iterator[Callable[..., Any]]:
    """The classes and functions that the specs in a value of a config call, also in nested specs and lists."""
    if isinstance(value, Spec):
        if hasattr(value, "target"):
            yield value.target
        value = list(value.options().values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from targets(item)
