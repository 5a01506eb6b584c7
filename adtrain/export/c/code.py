"""Statements of a C function, the places of their values in memory, their text, and the functions that they call.

The functions are those of `kernels/export/`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from textwrap import TextWrapper
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from adtrain.codegen.elementwise import c_type, literal
from adtrain.core.program import Variable
from adtrain.core.types import ArrayType
from adtrain.files import asset_path
from adtrain.passes.plan_memory import Arena


class Part(NamedTuple):
    """The elements of a value from `start` on."""

    value: Variable
    start: int


class Struct(NamedTuple):
    """A struct of `layers.c` with the values of its members, which are int."""

    name: str
    members: tuple[int, ...]

    def text(self) -> str:
        """Its address as C text; members that are 0 are left out."""
        text = re.sub(r"/\*.*?\*/", "", blocks("layers.c")[self.name].text)
        named = zip(re.findall(r"\w+(?=[,;])", text), self.members, strict=True)
        return f"&(struct {self.name}){{{', '.join(f'.{name} = {x}' for name, x in named if x)}}}"


Argument = Variable | Part | Struct | str | int | float
"""An argument of a call; a struct is given by its address; a text stands for itself, such as the name of an array."""


@dataclass(frozen=True)
class Statement:
    """A call of a function.

    Attributes:
        function: one of `kernels/export/`; or with a `text` a generated one, whose parameters and body that is.
        calls: the functions of `kernels/export/` that a generated function calls.
        overwrites: arguments whose memory the last argument, the result, may take.
        checked: whether it returns 0 where it refuses the input.
    """

    function: str
    arguments: Sequence[Argument]
    text: str | None = None
    calls: tuple[str, ...] = ()
    overwrites: tuple[Variable, ...] = ()
    checked: bool = False

    @property
    def values(self) -> Iterator[Variable]:
        for x in self.arguments:
            if isinstance(x, (Variable, Part)):
                yield x.value if isinstance(x, Part) else x


@dataclass
class Code:
    """The statements of one function.

    Attributes:
        names: C names of values that have a place: parameters, weights that change, results that overwrite these.
        known: values that are constants. Those that statements use become arrays.
        weights: the names of those that belong to a layer.
        simd: whether arrays are in the layouts of `layers_simd.c`.
        integers: whether values are int8 and int32, which share one array.
        training: whether this is a training step. Its generated functions and its memory have names of their own.
        arrays: constant arrays by their C names.
        steps: statements, and comments between them.
        loops: names of generated functions by their texts.
        library: the functions of `kernels/export/` that are called.
        memory: for each array of values its declaration and its bytes, by name.
    """

    names: dict[Variable, str]
    known: Mapping[Variable, np.ndarray]
    weights: Mapping[Variable, str]
    simd: bool = False
    integers: bool = False
    training: bool = False
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    steps: list[Statement | str] = field(default_factory=list)
    loops: dict[str, str] = field(default_factory=dict)
    library: dict[str, None] = field(default_factory=dict)
    memory: dict[str, tuple[str, int]] = field(default_factory=dict)
    _roots: dict[Variable, Variable] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        return "train_" if self.training else ""

    @property
    def statements(self) -> list[Statement]:
        return [x for x in self.steps if isinstance(x, Statement)]

    @property
    def bytes(self) -> int:
        """Bytes of the memory of values."""
        return sum(size for _, size in self.memory.values())

    def add(self, statement: Statement) -> None:
        function = statement.function
        if statement.text is None:
            self.library[function] = None
        else:
            unique = f"{self.prefix}{function}_{len(self.loops)}"
            self.loops.setdefault(statement.text, unique)
            self.library |= dict.fromkeys(statement.calls)
        for v in map(self.root, statement.values):
            if v in self.known and v not in self.names:
                self.names[v] = self.weight(v)
        self.steps.append(statement)

    def value(self, shape: tuple[int, ...], dtype: str = "float32") -> Variable:
        """A new value, such as memory that a function uses for itself."""
        return Variable(ArrayType(shape, np.dtype(dtype)), "cpu")

    def same(self, v: Variable, source: Variable) -> None:
        """Let `v` have the memory of `source`."""
        self._roots[v] = self.root(source)

    def root(self, v: Variable) -> Variable:
        """The value whose memory `v` has."""
        return self._roots.get(v, v)

    def constant(self, name: str, x: ArrayLike) -> str:
        """Add a constant array and return its C name, `name` with characters that C allows."""
        unique = c_identifier(name)
        while unique in self.arrays and not np.array_equal(self.arrays[unique], x):
            unique += "_"
        self.arrays[unique] = np.asarray(x)
        return unique

    def weight(self, v: Variable, x: ArrayLike | None = None) -> str:
        """The C name of a value that is known, or of `x`, the same in another layout, which is another array."""
        if x is None and v in self.names:
            return self.names[v]
        name = f"layer_{self.weights[v]}" if v in self.weights else f"{self.prefix}constant_{len(self.arrays)}"
        return self.constant(name, self.known[v] if x is None else x)

    def place(self, kept: Iterable[Variable]) -> None:
        """Give each value elements of an array of its type. Values that are not needed at the same time share them.

        `kept` are read after the last statement. A result takes the memory of an argument that is not read again, where
        its statement allows that.
        """
        statements = self.statements
        first: dict[Variable, int] = {}
        last: dict[Variable, int] = {}
        for i, statement in enumerate(statements):
            for v in map(self.root, statement.values):
                if v not in self.names:
                    first.setdefault(v, i)
                    last[v] = i
        last |= {v: len(statements) for v in map(self.root, kept) if v in first}
        owner: dict[Variable, Variable] = {}
        for i, statement in enumerate(statements):
            result = next((self.root(v) for v in reversed(list(statement.values))), None)
            if result is None or first.get(result) != i:
                continue
            for v in statement.overwrites:
                source = self.root(v)
                source = owner.get(source, source)
                if last.get(source) == i and source is not result and source.nbytes == result.nbytes:
                    owner[result] = source
                    last[source] = last[result]
                    break
        arenas: dict[str, Arena] = {}
        for v in first:
            if v not in owner:
                arena = arenas.setdefault(self._array(v.type.dtype), Arena())
                arena.add(v, v.nbytes, first[v], last[v])
        for name, arena in arenas.items():
            offsets = arena.offsets()
            size = arena.size(offsets)
            for v in first:
                if v in offsets:
                    dtype = np.dtype(np.int32) if self.integers else v.type.dtype
                    self.memory[name] = f"static {c_type(dtype)} {name}[{max(size // dtype.itemsize, 1)}];", size
                    array = "bytes" if v.type.dtype == np.int8 else name
                    self.names[v] = f"{array} + {offsets[v] // v.type.dtype.itemsize}"
        self.names |= {v: self.names[source] for v, source in owner.items()}

    def _array(self, dtype: np.dtype[Any]) -> str:
        """The name of the array for values of a type."""
        plain = self.integers or dtype == np.float32
        return f"{self.prefix}memory" if plain else f"{self.prefix}memory_{dtype.name}"

    def text(self, x: Argument) -> str:
        """An argument as C."""
        if isinstance(x, Part):
            return f"{self.text(x.value)} + {x.start}" if x.start else self.text(x.value)
        if isinstance(x, Variable):
            return self.names[self.root(x)]
        if isinstance(x, Struct):
            return x.text()
        return number(np.float32(x)) if isinstance(x, float) else str(x)

    def call(self, statement: Statement) -> str:
        function = statement.function if statement.text is None else self.loops[statement.text]
        called = f"{function}({', '.join(map(self.text, statement.arguments))})"
        return f"if (!{called}) return -1;" if statement.checked else f"{called};"

    def body(self) -> Iterator[str]:
        """The calls, with an empty line before each comment on the next ones."""
        for before, x in zip(["", *self.steps], self.steps, strict=False):
            if isinstance(x, str):
                yield f"{'' if isinstance(before, str) else chr(10)}    /* {x} */"
            else:
                yield statement(self.call(x))

    def functions(self) -> list[str]:
        """The generated functions."""
        checked = {s.text for s in self.statements if s.checked}
        return [f"static {'int' if text in checked else 'void'} {name}{text}" for text, name in self.loops.items()]


def c_identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)


WIDTH = 110
"""Columns of a line of numbers, or of a statement."""

_WRAPPER = TextWrapper(
    WIDTH, initial_indent="    ", subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False
)


def number(x: np.generic) -> str:
    """A number; of floats the shortest decimal number that is read as the same float."""
    return f"{x!s}f" if x.dtype == np.float32 and isfinite(x) else literal(x.item())


def numbers(x: np.ndarray) -> Iterator[str]:
    """The elements of an array as lines; see `number`."""
    line = "   "
    for element in x.reshape(-1):
        item = f" {number(element)},"
        if len(line) + len(item) > WIDTH:
            yield line
            line = "   "
        line += item
    yield line


def statement(text: str) -> str:
    """A statement in the body of a function, in lines of at most WIDTH columns."""
    joined = text.replace(" = ", "\0=\0").replace(" + ", "\0+\0")  # no line ends within an initialiser or a sum
    return _WRAPPER.fill(joined).replace("\0", " ")


def c_string(text: str) -> str:
    """A C string with the UTF-8 bytes of a text; others than letters, digits and some signs are octal numbers."""
    plain = (32, *range(44, 60), *range(64, 92), 95, *range(97, 123), 40, 41)
    return '"' + "".join(chr(b) if b in plain else f"\\{b:03o}" for b in text.encode()) + '"'


_NAME = re.compile(
    r"^(?:static|INLINE)[\w\s*]*?\b(\w+)\(|^struct (\w+) \{|^typedef .*?\b(\w+) __|^#\s*define (\w+)", re.MULTILINE
)


class Block(NamedTuple):
    """A function, a struct or a definition with the comment above it."""

    text: str
    uses: frozenset[str]


def _uses(text: str) -> frozenset[str]:
    """The functions that a text calls, and the structs, types and macros that it names, without its comments."""
    code = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return frozenset(re.findall(r"\w+(?=\()|(?<=struct )\w+|\bvector\b|\b[A-Z]+\b", code))


@functools.cache
def blocks(*files: str) -> dict[str, Block]:
    """The blocks of these files by name; a file's blocks replace those of the same name in later files."""
    found: dict[str, Block] = {}
    for file in files:
        text = (asset_path("kernels") / "export" / file).read_text(encoding="utf-8")
        for part in text.split("\n\n"):
            if match := _NAME.search(part):
                name = next(filter(None, match.groups()))
                found.setdefault(name, Block(part.strip("\n"), _uses(part)))
    return found


def needed(functions: Iterable[str], *files: str) -> list[str]:
    """The texts of these functions and of all that they use, each after those that it uses."""
    library, found = blocks(*files), dict[str, str]()

    def add(name: str) -> None:
        if name not in found:
            for other in sorted(library[name].uses & library.keys() - {name}):
                add(other)
            found[name] = library[name].text

    for name in functions:
        add(name)
    return list(found.values())
