"""Equations of small items: one thread computes all of them for its item, with every element in a register.

The loops over the elements of an item are unrolled here, so each element has a name. Equations that only move elements,
such as a slice or a transpose, cost nothing: they choose names. An element is computed when it is first read.

The threads of a warp copy pieces of their items through shared memory (`common/warp_items.cuh`). The order of these
copies is known, so several are under way while a thread computes. The block copies shared arrays, which all items need,
to shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from adtrain.backends.cuda.codegen.loops import flat
from adtrain.backends.cuda.codegen.part import Part, aligned_to_vector, indented
from adtrain.codegen.elementwise import c_type, literal, statements
from adtrain.core.kernel import WARP
from adtrain.core.precision import FULL
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable, body_of
from adtrain.core.types import Shape
from adtrain.lowering.cuda.reduce import vector_width
from adtrain.passes.fusion import by_element

THREADS = 128
"""Threads of a block."""
PIECE_BYTES = 128
"""Maximum bytes of a piece: neighbouring elements of an item that are copied together."""
MAX_STAGES = 6
"""Maximum stages: buffers of a warp in shared memory, each for a piece of its items."""
STAGE_BYTES = 64 << 10
"""Maximum bytes of the stages of a block. They include one more for each warp, for results on their way to memory."""
BEGIN = "// begin copy "
"""A line of this text and the number of a copy: that copy is read, so the next copy to its stage begins here."""
KEPT_ELEMENTS, KEPT_VECTORS = 64, 16
"""Maximum elements of items, and vectors of shared arrays, that a thread keeps. It reads others again."""


class Element(NamedTuple):
    """An element of the item of a variable, or of a shared array."""

    variable: Variable
    at: int


Elements: TypeAlias = np.ndarray
"""The elements of an item or a shared array, in its shape: objects that are an `Element`, or the C text of a number."""
Move: TypeAlias = Callable[[Equation, Sequence[Elements], Shape], Elements]
"""``move(equation, elements of its arguments, shape of an item of its result)`` returns the elements of the item."""
Key: TypeAlias = tuple[Variable, int]
"""A variable, and the first element of a piece or a vector of it."""


def item_shape(v: Variable, count: int) -> Shape:
    """The shape of one of `count` items: one index or several of axis 0."""
    return (v.type.shape[0] // count, *v.type.shape[1:])


def has_rule(e: Equation) -> bool:
    """Whether a thread can compute the equation for an item."""
    if by_element(e) or e.has(Trait.RESHAPE) or e.primitive.name in MOVES:
        return True
    if e.has(Trait.MATMUL):
        return bool(e.params["precision"] == FULL)
    return e.primitive.name in RULES and 0 not in e.params.get("axes", (e.params.get("axis"),))


def operations(e: Equation, count: int) -> int:
    """The number of statements of an equation for one of `count` items."""
    if e.has(Trait.RESHAPE) or e.primitive.name in MOVES:
        return 0
    size = e.outputs[0].size // count
    if e.has(Trait.MATMUL):
        return size * e.inputs[0].type.shape[-2 if e.params["transpose_a"] else -1]
    computed = sum(x.primitive.name not in MOVES for x in body_of(e).equations)
    return computed * (size if by_element(e) else e.inputs[0].size // count)


def thread_items(body: Program, count: int, shared: frozenset[Variable]) -> Part:
    """The part for a body of `count` items.

    Args:
        shared: the inputs that are shared arrays.
    """
    return _Writer(body, count, shared).part()


class _Writer:
    """Writes the statements of a thread.

    Attributes:
        pointers: the names of the inputs.
        names: for each computed variable, the name of the C array of its item.
        values: the elements of each variable.
        pieces, vectors: the names of the pieces of items, and of the vectors of shared arrays, that are in registers.
            The one that was read last is last.
        reader: for each piece the equation that read it last.
        current: the equation that reads.
        made: the elements whose statements are written.
        copies: the statements that begin copies, in the order in which the pieces are needed.
        stage: bytes of a stage, which holds the largest piece of the 32 items of a warp.
    """

    def __init__(self, body: Program, count: int, shared: frozenset[Variable]) -> None:
        self.body, self.count, self.shared = body, count, shared
        self.producer = {v: e for e in body.equations for v in e.outputs}
        self.pointers = {v: f"x{i}" for i, v in enumerate(body.inputs)}
        self.names: dict[Variable, str] = {}
        self.values: dict[Variable, Elements] = {}
        self.pieces: dict[Key, str] = {}
        self.vectors: dict[Key, str] = {}
        self.reader: dict[Key, Equation | None] = {}
        self.current: Equation | None = None
        self.made: set[Element] = set()
        self.copies: list[str] = []
        self.lines: list[str] = []
        self.arrays = 0
        self.stage = 0

    def part(self) -> Part:
        """See `thread_items`."""
        for v in self.body.inputs:
            self.values[v] = _elements(v, v.type.shape if v in self.shared else item_shape(v, self.count))
        for e in self.body.equations:
            self._define(e)
            self._store([v for v in e.outputs if v in self.body.outputs])
        fit = STAGE_BYTES // (THREADS // WARP * self.stage) - 1
        stages = max(1, min(MAX_STAGES, fit, len(self.copies)))

        def begin(copy: int) -> str:
            """The statement that begins a copy. After the last copy it commits an empty group of cp.async."""
            return self.copies[copy] if copy < len(self.copies) else "cp_async_commit_group();"

        lines = [
            f"constexpr int STAGES = {stages}, STAGE = {self.stage}, OF_WARP = (STAGES + 1) * STAGE;",
            f"const int64_t first = ((int64_t)block * THREADS + threadIdx.x) / {WARP} * {WARP};",
            f"const int64_t left = {self.count} - first;",
            f"const WarpItems<STAGE> items{{(char *)shared_bytes + threadIdx.x / {WARP} * OF_WARP, first, left}};",
            *(line for v in self.body.inputs if v in self.shared for line in self._copy_whole(v)),
            "__syncthreads();",
            "if (left <= 0) return;",
            *map(begin, range(stages)),
            *(f"{c_type(v.type.dtype)} {name}[{self._size(v)}];" for v, name in self.names.items()),
            *(begin(stages + int(x.removeprefix(BEGIN))) if x.startswith(BEGIN) else x for x in self.lines),
        ]
        headers = ("reduce/register_rows.cuh", "common/warp_items.cuh")
        bytes_of_stages, blocks = THREADS // WARP * (stages + 1) * self.stage, -(-self.count // THREADS)
        return Part(lines, self.body.inputs, self.body.outputs, headers, blocks=blocks, shared=bytes_of_stages)

    def _copy_whole(self, v: Variable) -> list[str]:
        """Statements that copy a shared array to shared memory."""
        pointer = self.pointers[v]
        return [
            f"__shared__ __align__(16) {c_type(v.type.dtype)} w{pointer}[{v.size}];",
            f"for (int i = threadIdx.x; i < {v.size}; i += THREADS) w{pointer}[i] = {pointer}[i];",
        ]

    def _use_stage(self, count: int, wide: int, itemsize: int) -> None:
        """Make stages large enough for pieces of `count` elements: `Piece::BYTES` of `common/warp_items.cuh`."""
        vectors = count // wide
        pitch = vectors if vectors % 2 else vectors + 1
        self.stage = max(self.stage, aligned_to_vector(WARP * pitch * wide * itemsize))

    def _array(self) -> str:
        """A new name of an array."""
        self.arrays += 1
        return f"a{self.arrays - 1}"

    def _size(self, v: Variable) -> int:
        return v.size // self.count

    def _define(self, e: Equation) -> None:
        """Name the elements of the results of an equation."""
        if e.has(Trait.RESHAPE) or e.primitive.name in MOVES:
            (y,) = e.outputs
            shape = item_shape(y, self.count)
            given = [self.values[v] for v in e.inputs]
            move = MOVES.get(e.primitive.name)
            self.values[y] = given[0].reshape(shape) if move is None else move(e, given, shape)
            return
        for v in e.outputs:
            self.names[v] = f"v{len(self.names)}"
            self.values[v] = _elements(v, item_shape(v, self.count))

    def text(self, x: object) -> str:
        """The C text of an element. The statements that compute or load it are written first."""
        if not isinstance(x, Element):
            return str(x)
        if x.variable in self.pointers:
            return self._loaded(x)
        if x not in self.made:
            self._compute(x)
        return f"{self.names[x.variable]}[{x.at}]"

    def _loaded(self, x: Element) -> str:
        """The C text of an element of an input."""
        v = x.variable
        if v in self.shared:
            return self._of_shared(x)
        size, itemsize = self._size(v), v.type.dtype.itemsize
        first, count = _piece(x.at, size, itemsize)
        key = v, first
        if key not in self.pieces:
            self._forget(count)
            name, copy, wide = self._array(), len(self.copies), vector_width(size, itemsize)
            self.copies.append(f"items.begin<{copy} % STAGES, {size}, {first}, {count}, {wide}>({self.pointers[v]});")
            self._use_stage(count, wide, itemsize)
            self.lines += [
                f"{c_type(v.type.dtype)} {name}[{count}];",
                f"items.finish<{copy} % STAGES, STAGES - 1, {count}, {wide}>({name});",
                f"{BEGIN}{copy}",
            ]
            self.pieces[key] = name
        name = self.pieces[key] = self.pieces.pop(key)
        self.reader[key] = self.current
        return f"{name}[{x.at - first}]"

    def _forget(self, count: int) -> None:
        """Forget pieces, so that there is room for `count` elements. Those that the current equation reads stay."""
        sizes = {(v, at): _piece(at, self._size(v), v.type.dtype.itemsize)[1] for v, at in self.pieces}
        for key in [key for key in self.pieces if self.reader[key] is not self.current]:
            if sum(sizes[key] for key in self.pieces) + count <= KEPT_ELEMENTS:
                break
            self.pieces.pop(key)

    def _of_shared(self, x: Element) -> str:
        """The C text of an element of a shared array."""
        v = x.variable
        c, wide = c_type(v.type.dtype), vector_width(v.size, v.type.dtype.itemsize)
        key = v, x.at // wide * wide
        if key not in self.vectors:
            if len(self.vectors) >= KEPT_VECTORS:
                self.vectors.pop(next(iter(self.vectors)))
            name = self._array()
            self.lines.append(f"const Vector<{c}, {wide}> {name} = load<{c}, {wide}>(w{self.pointers[v]} + {key[1]});")
            self.vectors[key] = name
        name = self.vectors[key] = self.vectors.pop(key)
        return f"{name}.lane[{x.at - key[1]}]"

    def _compute(self, x: Element) -> None:
        e = self.producer[x.variable]
        if by_element(e):
            self._elementwise(e, x.at)
            return
        rule = _Writer.product if e.has(Trait.MATMUL) else RULES[e.primitive.name]
        rule(self, e)
        self.made.update(Element(v, k) for v in e.outputs for k in range(self._size(v)))

    def _elementwise(self, e: Equation, at: int) -> None:
        body = flat(body_of(e))
        shape = item_shape(e.outputs[0], self.count)
        place = np.unravel_index(at, shape)
        elements = {v: np.broadcast_to(self.values[v], shape)[place] for v in body.inputs}
        for x in elements.values():
            self.text(x)  # writes the equations that compute it first
        self.current = e
        values = {v: self.text(x) for v, x in elements.items()}
        results = [f"{self.names[v]}[{at}]" for v in e.outputs]
        self.lines += ["{", *indented(statements(body, values, results)), "}"]
        self.made.update(Element(v, at) for v in e.outputs)

    def product(self, e: Equation) -> None:
        """A matrix product. Each step along K adds to neighbouring columns, which read one vector of a shared array."""
        (y,) = e.outputs
        a, b = (self.values[v] for v in e.inputs)
        a = a.swapaxes(-1, -2) if e.params["transpose_a"] else a
        shape = item_shape(y, self.count)
        batch = shape[:-2]
        rows, columns, length = *shape[-2:], a.shape[-1]
        a, b = np.broadcast_to(a, (*batch, rows, length)), b
        b = np.broadcast_to(b.swapaxes(-1, -2) if e.params["transpose_b"] else b, (*batch, length, columns))
        for v in e.inputs:  # write the equations that compute them first
            if v not in self.shared:
                for x in self.values[v].flat:
                    self.text(x)
        self.current = e
        name, wide = self.names[y], vector_width(columns, y.type.dtype.itemsize)
        for i, (*at, row) in enumerate(np.ndindex(*batch, rows)):
            for first in range(0, columns, wide):
                for k in range(length):
                    for column in range(first, first + wide):
                        result = f"{name}[{i * columns + column}]"
                        x, w = self.text(a[(*at, row, k)]), self.text(b[(*at, k, column)])
                        self.lines.append(f"{result} = fma({x}, {w}, {result});" if k else f"{result} = {x} * {w};")

    def reduce(self, e: Equation, op: str) -> None:
        """A reduction by the struct `op` of `common/collectives.cuh`."""
        (x,), (y,) = e.inputs, e.outputs
        c = c_type(y.type.dtype)
        for i, row in enumerate(_rows(self.values[x], e.params["axes"])):
            result = f"{self.names[y]}[{i}]"
            for k, element in enumerate(row):
                value = f"({c}){self.text(element)}"
                self.lines.append(f"{result} = {op}::of({result}, {value});" if k else f"{result} = {value};")

    def logsumexp(self, e: Equation) -> None:
        (x,), (y,) = e.inputs, e.outputs
        c, rows = c_type(y.type.dtype), _rows(self.values[x], e.params["axes"])
        for i, row in enumerate(rows):
            elements = [self.text(element) for element in row]
            top = elements[0]
            for element in elements[1:]:
                top = f"Max::of({top}, {element})"
            total = " + ".join(f"exp({element} - from)" for element in elements)
            finite = f"isfinite(top) ? ({c})log({total}) + top : top"
            lines = [f"const {c} top = {top}, from = isfinite(top) ? top : 0;", f"{self.names[y]}[{i}] = {finite};"]
            self.lines += ["{", *indented(lines), "}"]

    def softmax(self, e: Equation, logarithm: bool) -> None:
        (x,), (y,) = e.inputs, e.outputs
        c, axis = c_type(y.type.dtype), e.params["axis"]
        places = _rows(self.values[y], (axis,))
        for row, into in zip(_rows(self.values[x], (axis,)), places, strict=True):
            elements, n = ", ".join(map(self.text, row)), len(row)
            lines = [f"const {c} given[{n}] = {{{elements}}};", f"{c} made[{n}];"]
            lines.append(f"RegisterRow<{n}, 1, {n}, 1>::softmax<{str(logarithm).lower()}>(given, made);")
            lines += [f"{self.names[y]}[{place.at}] = made[{k}];" for k, place in enumerate(into)]
            self.lines += ["{", *indented(lines), "}"]

    def _store(self, variables: Sequence[Variable]) -> None:
        """Store results of an equation, which all have the same shape, piece by piece."""
        size, at = self._size(variables[0]) if variables else 0, 0
        while at < size:
            count = min(_piece(at, size, v.type.dtype.itemsize)[1] for v in variables)
            for v in variables:
                name, wide = self._array(), vector_width(size, v.type.dtype.itemsize)
                elements = ", ".join(map(self.text, self.values[v].flat[at : at + count]))
                self._use_stage(count, wide, v.type.dtype.itemsize)
                pointer = f"y{self.body.outputs.index(v)}"
                self.lines += [
                    f"const {c_type(v.type.dtype)} {name}[{count}] = {{{elements}}};",
                    f"items.store<STAGES, {size}, {at}, {count}, {wide}>({name}, {pointer});",
                ]
            at += count


def _piece(at: int, size: int, itemsize: int) -> tuple[int, int]:
    """The first element of the piece that has element `at` of an item, and the number of its elements."""
    most = PIECE_BYTES // itemsize
    first = at // most * most
    return first, min(most, size - first)


RULES: Mapping[str, Callable[[_Writer, Equation], None]] = {
    "sum": partial(_Writer.reduce, op="Sum"),
    "max": partial(_Writer.reduce, op="Max"),
    "min": partial(_Writer.reduce, op="Min"),
    "logsumexp": _Writer.logsumexp,
    "softmax": partial(_Writer.softmax, logarithm=False),
    "log_softmax": partial(_Writer.softmax, logarithm=True),
}
"""By primitive name. Elementwise equations and products have methods of `_Writer`."""


def _sliced(e: Equation, given: Sequence[Elements], shape: Shape) -> Elements:
    bounds = zip(e.params["starts"], e.params["stops"], e.params["steps"], strict=True)
    return given[0][(slice(None), *(slice(*each) for each in list(bounds)[1:]))]


def _padded(e: Equation, given: Sequence[Elements], shape: Shape) -> Elements:
    value = f"({c_type(e.outputs[0].type.dtype)})({literal(e.params['value'])})"
    found: Elements = e.primitive.reference(given[0], **{**e.params, "value": value})
    return found


MOVES: Mapping[str, Move] = {
    "slice": _sliced,
    "pad": _padded,
    "concatenate": lambda e, given, shape: np.concatenate(given, e.params["axis"]),
    "transpose": lambda e, given, shape: given[0].transpose(e.params["axes"]),
    "broadcast_to": lambda e, given, shape: np.broadcast_to(given[0], shape),
}
"""By primitive name. The elements of the result are elements of the arguments, or numbers."""


def _elements(v: Variable, shape: Shape) -> Elements:
    """Elements of a variable that is computed or read."""
    found = np.empty(prod(shape), object)
    for i in range(len(found)):
        found[i] = Element(v, i)
    return found.reshape(shape)


def _rows(x: Elements, axes: Sequence[int]) -> Sequence[Sequence[Any]]:
    """The elements that a reduction over `axes` combines, for each result."""
    last = np.moveaxis(x, axes, range(x.ndim - len(axes), x.ndim))
    found: Sequence[Sequence[Any]] = last.reshape(-1, prod(x.shape[i] for i in axes)).tolist()
    return found
