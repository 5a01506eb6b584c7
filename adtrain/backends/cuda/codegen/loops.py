"""Elementwise equations as one loop nest. Arguments may be rows of a table, read by index (`gather`).

A `gather` may store its result transposed, and read arguments transposed.

The epilogue of a product or convolution is a struct whose functions its kernel calls for the elements of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from adtrain.backends.cuda.codegen.part import OPTIONS, Part, indented
from adtrain.backends.cuda.compiler import Source
from adtrain.codegen.elementwise import (
    access,
    axes_of,
    held,
    lane,
    loaded,
    offset,
    pointer,
    read,
    statements,
    vector_results,
)
from adtrain.core.kernel import Target
from adtrain.core.primitive import Trait
from adtrain.core.program import LOOPS, Equation, Program, Variable, arguments_of, body_of
from adtrain.lowering.cuda.gemm.bfloat16 import EpilogueBytes

MAX_VECTOR = 16
"""Bytes of the widest load or store of a thread."""
PART_BLOCKS = 2
"""Most blocks of a `Part` for each multiprocessor; larger parts loop."""
MEMBER_VECTORS = 4
"""Vectors that a thread computes in a Program by member, where other members fill the device."""
ELEMENT_LOOP = "for (auto i = first; i < n; i += step) {"
VECTOR_LOOP = "for (auto g = first; g < vectors; g += step) {"
ONCE = {
    ELEMENT_LOOP: "if (const auto i = first; i < n) {",
    VECTOR_LOOP: "if (const auto g = first; g < vectors) {",
}
"""What stands in place of a loop where each thread has at most one round."""
REST_LOOP = "for (auto i = vectors * WIDTH + first; i < n; i += step) {"
"""For the elements after the last whole vector, or for all of them if a pointer is not aligned."""


@dataclass(frozen=True)
class Loops:
    """Statements for elements ``first, first + step, ... < n`` (vectors of them, where `width` is not 1).

    Attributes:
        elements: how many elements the results have.
        width: elements that a thread computes at once.
    """

    lines: Sequence[str]
    inputs: Sequence[Variable]
    outputs: Sequence[Variable]
    elements: int
    width: int
    checked: bool

    @property
    def vectors(self) -> int:
        return -(-self.elements // self.width)

    def source(self) -> Source:
        """The kernel ``loops(inputs..., outputs..., int64_t n[, int *bad])``, for any grid."""
        inputs = [f"{pointer(v, const=True)}x{i}" for i, v in enumerate(self.inputs)]
        outputs = [f"{pointer(v)}y{i}" for i, v in enumerate(self.outputs)]
        parameters = [*inputs, *outputs, "int64_t n", *(["int *bad"] if self.checked else [])]
        lines = [
            '#include "common/common.cuh"',
            "",
            f"KERNEL loops({', '.join(parameters)})",
            "{",
            "    wait_for_inputs();",
            "    const int64_t first = grid_index(), step = grid_size();",
            *indented(self.lines),
            "}",
            "",
        ]
        return Source("loops.cu", "\n".join(lines), OPTIONS)

    def part(self, threads: int, target: Target) -> Part:
        vectors = MEMBER_VECTORS if target.by_member else 1
        blocks = min(-(-self.vectors // (threads * vectors)), PART_BLOCKS * target.multiprocessors)
        kind = "int" if self.elements < 2**30 else "int64_t"
        lines = [f"const {kind} first = block * THREADS + threadIdx.x, step = n1 * THREADS, n = n0;"]
        for line in self.lines:
            if line == VECTOR_LOOP and vectors > 1:
                lines.append(f"#pragma unroll {vectors}")
            elif line in ONCE and self.vectors <= blocks * threads:  # the compiler would unroll a loop
                line = ONCE[line]
            elif line == REST_LOOP:
                lines.append("#pragma unroll 1  // at most one round, unless a pointer is not aligned")
            lines.append(line)
        lengths = self.elements, blocks
        return Part(lines, self.inputs, self.outputs, blocks=blocks, checked=self.checked, lengths=lengths)


def loops(equation: Equation) -> Loops:
    """The statements of a `loops` or `gather` equation, or of a single elementwise one."""
    return of_body(flat(body_of(equation)))


def flat(body: Program) -> Program:
    """A body with each `loops` equation replaced by its members."""
    equations = [x for e in body.equations for x in (body_of(e).equations if e.form == LOOPS else [e])]
    return Program(body.inputs, body.constants, tuple(equations), body.outputs)


def of_body(body: Program) -> Loops:
    """The statements of elementwise equations, the gathers of their rows, and the gather of the row of indices."""
    takes = {e.outputs[0]: e for e in body.equations if e.has(Trait.GATHER)}
    transposes = [e for e in body.equations if e.primitive.name == "transpose"]
    loaded = {e.outputs[0]: e for e in transposes if e.inputs[0] in body.inputs}
    transpose = next((e for e in transposes if e.outputs[0] not in loaded), None)
    views = {e.outputs[0]: e.inputs[0] for e in body.equations if e is transpose or e.has(Trait.RESHAPE)}
    inner = tuple(e for e in body.equations if not any(e.outputs[0] in known for known in (takes, loaded, views)))
    made = {v for e in inner for v in e.outputs}
    read = tuple(dict.fromkeys(v for e in inner for v in e.inputs if v not in made))
    outputs = tuple(_source(v, views) for v in body.outputs)
    assert made.issuperset(outputs), "a gather returns what is computed from rows, not the rows themselves"
    program = Program(read, {}, inner, outputs)
    axes = axes_of(program)
    width = MAX_VECTOR // max(v.type.dtype.itemsize for v in (*read, *outputs))
    if len(axes) > 1 and axes[-1].length % width:
        width = 1  # a vector must not reach into the next row
    if any(_row_length(takes[v]) % width for v in read if v in takes):
        width = 1
    lines = _Writer(program, width, body.inputs, takes, loaded, transpose).lines()
    return Loops(lines, body.inputs, body.outputs, math.prod(outputs[0].type.shape), width, bool(takes))


def _source(v: Variable, views: dict[Variable, Variable]) -> Variable:
    """The variable that `v` is a view of."""
    while v in views:
        v = views[v]
    return v


def _row_length(take: Equation) -> int:
    return math.prod(take.inputs[0].type.shape[1:])


class _Writer:
    """Writes the statements for element i of the n elements of the results, in row-major order.

    An operand of the results' shape is read at i, a scalar once before the loop, and a broadcast at an index computed
    from i.
    """

    def __init__(
        self,
        program: Program,
        width: int,
        inputs: Sequence[Variable],
        takes: dict[Variable, Equation],
        loaded: dict[Variable, Equation],
        transpose: Equation | None,
    ) -> None:
        self.transpose, self.loaded = transpose, loaded
        self.program, self.width = program, width
        self.names = {v: f"x{i}" for i, v in enumerate(inputs)}
        self.takes = takes
        self.numbers: dict[Variable, str] = {}  # single numbers
        self.before: list[str] = []
        self.index: dict[Variable, tuple[str, bool]] = {}  # the place of element i; if a vector has neighbours
        shape = program.outputs[0].type.shape
        kind = "uint32_t" if math.prod(shape) < 2**31 else "int64_t"
        for i, v in enumerate(program.inputs):
            found = access(v.type.shape, shape, (f"({kind})i", len(shape)))
            if v in loaded:
                continue
            if v in takes:
                self.index[v] = "i", True
                self._list_indices(i, takes[v].inputs[1])
            elif found.place == "0":
                line, self.numbers[v] = read(v, f"a{i}", self.names[v], "0")
                self.before.append(line)
            elif v.size == math.prod(shape):
                self.index[v] = "i", True
            else:  # a broadcast may have one value for the whole vector
                self.index[v] = f"(int64_t)({found.place})", found.step == 1

    def lines(self) -> list[str]:
        one = [*indented(self._elements(1)), "}"]
        if self.width == 1:
            return [*self.before, ELEMENT_LOOP, *one]
        pointers = [self.names[v] for v in self.index if v not in self.takes]
        pointers += [self.names[self.takes[v].inputs[0]] for v in self.index if v in self.takes]
        pointers += [f"y{i}" for i in range(len(self.program.outputs))]
        aligned = " | ".join(f"(uintptr_t){p}" for p in pointers)
        return [
            f"constexpr int WIDTH = {self.width};",
            *self.before,
            f"const auto vectors = ({aligned}) % {MAX_VECTOR} == 0 ? n / WIDTH : 0;",
            VECTOR_LOOP,
            f"    const auto i = {self._vector()} * WIDTH;",
            *indented(self._elements(self.width)),
            "}",
            REST_LOOP,
            *one,
        ]

    def _vector(self) -> str:
        """The number of the vector that thread g computes.

        If the argument of a transpose has most of the bytes, neighbouring threads read neighbouring elements of it.
        """
        arrays = [v for v in (*self.program.inputs, *self.program.outputs) if v not in self.numbers]
        v = max(self.loaded, key=lambda v: v.nbytes, default=None)
        if v is None or 2 * v.nbytes <= sum(x.nbytes for x in arrays) or v.type.shape[-1] % self.width:
            return "g"
        axes, vectors = self.loaded[v].params["axes"], (*v.type.shape[:-1], v.type.shape[-1] // self.width)
        steps = {axis: math.prod(vectors[i + 1 :]) for i, axis in enumerate(axes)}
        lengths = [vectors[axes.index(axis)] for axis in range(len(axes))]
        kind = "uint32_t" if v.size < 2**31 else "int64_t"
        return f"({offset(f'({kind})g', lengths, [steps[axis] for axis in range(len(axes))])})"

    def _elements(self, width: int) -> list[str]:
        """The statements for element i, or for as many as a vector has, from i on."""
        lines: list[str] = []
        values = dict(self.numbers)
        for i, v in enumerate(self.program.inputs):
            if v in self.index:
                place, adjacent = self.index[v]
                name, place = self._gathered(i, v, lines) if v in self.takes else (self.names[v], place)
                line, values[v] = read(v, f"b{i}", name, place, "WIDTH" if width > 1 and adjacent else 1)
                lines.append(line)
            elif v in self.loaded:
                loads, values[v] = self._transposed(v, f"b{i}", width)
                lines += loads
        outputs = self.program.outputs
        if width == 1:
            return [
                *lines,
                *statements(self.program, values, [f"y{i}[{self._place('i')}]" for i in range(len(outputs))]),
            ]
        single = [f"y{i}[{self._place('(i + k)')}] = r{i}.lane[k];" for i in range(len(outputs)) if self.transpose]
        return [
            *lines,
            *vector_results(self.program, values, "WIDTH", single),
            *(f"store(y{i}, i, r{i});" for i in range(len(outputs)) if not self.transpose),
        ]

    def _transposed(self, v: Variable, name: str, width: int) -> tuple[list[str], str]:
        """Statements that load element i of a transpose, or as many as a vector has, and the value."""
        e = self.loaded[v]
        (x,), lengths, axes = e.inputs, v.type.shape, e.params["axes"]
        steps = [math.prod(x.type.shape[axis + 1 :]) for axis in axes]
        kind = "uint32_t" if v.size < 2**31 else "int64_t"
        if width == 1:
            line, value = read(x, name, self.names[x], offset(f"({kind})i", lengths, steps))
            return [line], value
        place = offset(f"({kind})(i + k)", lengths, steps)
        value = lane(name, "WIDTH")
        load = ["#pragma unroll", f"for (int k = 0; k < WIDTH; k++) {value} = {self.names[x]}[{place}];"]
        return [f"{held(x, 'WIDTH')} {name};", *load], value

    def _place(self, i: str) -> str:
        """Where element `i` is stored."""
        if self.transpose is None:
            return i
        lengths, axes = self.transpose.inputs[0].type.shape, self.transpose.params["axes"]
        steps = [math.prod(lengths[axis] for axis in axes[axes.index(k) + 1 :]) for k in range(len(axes))]
        kind = "uint32_t" if math.prod(lengths) < 2**31 else "int64_t"
        return offset(f"({kind}){i}", lengths, steps)

    def _list_indices(self, i: int, indices: Variable) -> None:
        """Where the indices are a row of a table themselves: a pointer to that row, or to row 0 if there is none."""
        if indices not in self.takes:
            return
        table, at = self.takes[indices].inputs
        self.before += [
            f"const int64_t at{i} = (int64_t){self.names[at]}[0];",
            f"const bool listed{i} = at{i} >= 0 && at{i} < {table.type.shape[0]};",
            f"if (!listed{i}) *bad = 1;",
            f"{pointer(table, const=True)}list{i} = {self.names[table]} + (listed{i} ? at{i} : 0) * {indices.size};",
        ]
        self.names[indices] = f"list{i}"

    def _gathered(self, i: int, v: Variable, lines: list[str]) -> tuple[str, str]:
        """The table of rows by index, and the place of an element in it; row 0 where there is no such row."""
        table, indices = self.takes[v].inputs
        rows, length = table.type.shape[0], _row_length(self.takes[v])
        lines.append(f"const int64_t row{i} = (int64_t){self.names[indices]}[i / {length}];")
        lines.append(f"const bool there{i} = row{i} >= 0 && row{i} < {rows};")
        lines.append(f"if (!there{i}) *bad = 1;")
        return self.names[table], f"(there{i} ? row{i} : 0) * {length} + i % {length}"


GROUPED_BFLOAT16 = "grouped_bfloat16"
"""Independent products of bfloat16 with equal epilogues, whose tiles share the blocks of a launch."""

MAXIMUM = "Maximum largest;", "#pragma unroll", "for (int k = 0; k < WIDE; k++) largest.take(k, r0.lane[k]);"
"""Statements that reduce a pooling window to its maximum."""


class Epilogue(NamedTuple):
    """A struct in CUDA C++ that holds pointers to `inputs`, then to `outputs`; see `common/epilogue.cuh`."""

    text: str
    inputs: Sequence[Variable]
    outputs: Sequence[Variable]


def matmul_of(equation: Equation) -> Equation:
    """The product or convolution before an epilogue, or `equation` itself."""
    return body_of(equation).equations[0]


def factors_of(equation: Equation) -> Sequence[Variable]:
    """The arguments of the product or convolution before an epilogue; of all products where several share a launch."""
    products = body_of(equation).equations if equation.form == GROUPED_BFLOAT16 else [equation]
    return [v for e in products for v in matmul_of(e).inputs]


def epilogue_bytes(equation: Equation) -> EpilogueBytes:
    """What the epilogue of a product moves."""
    product = matmul_of(equation)
    shape = product.outputs[0].type.shape

    def size(variables: Sequence[Variable], axes: int) -> int:
        """The bytes for an element of the arrays whose last axes are those of the product."""
        arrays = (v for v in variables if v not in product.inputs and v.type.shape[-axes:] == shape[-axes:])
        return sum(v.type.dtype.itemsize for v in arrays)

    rank = len(shape)
    return EpilogueBytes(size(equation.inputs, 1), size(equation.inputs, rank), size(equation.outputs, rank))


def epilogue(equation: Equation, name: str = "Epilogue", returned: Variable | None = None) -> Epilogue:
    """The epilogue of a product or convolution; see `epilogue_of`."""
    return epilogue_of(flat(body_of(equation)), name, returned)


def epilogue_of(
    body: Program, name: str = "Epilogue", returned: Variable | None = None, addends: Sequence[Variable] = ()
) -> Epilogue:
    """The epilogue of a product or convolution, the first equation. Without other equations it only stores the result.

    The epilogue of a convolution sees its images (N, C, H, W) as N matrices of C rows. An epilogue that ends with max
    pooling is called for the elements of a window, and `index` is the index of the window's maximum.

    Args:
        returned: the output that write() returns.
        addends: values of which the kernel computes sums over rows.
    """
    product, *others = body.equations
    (c,) = product.outputs
    pool = others.pop() if others and others[-1].has(Trait.MAX_POOL) else None
    results = pool.inputs if pool else body.outputs
    inputs = tuple(v for v in arguments_of(others) if v is not c)
    program = Program((*inputs, c), {}, tuple(others), (*results, *addends))
    fields = [f"{pointer(v, const=True)}x{i};" for i, v in enumerate(inputs)]
    fields += [f"{pointer(v)}y{i};" for i, v in enumerate(body.outputs)]
    prefetches = [f"prefetch_l2(x{i} + index, count);" for i, v in enumerate(inputs) if v.type.shape == c.type.shape]
    sizes = (v.type.dtype.itemsize for v in (*inputs, *body.outputs) if v.type.shape == c.type.shape or pool)
    largest = max(sizes, default=c.type.dtype.itemsize)
    aux, reads, values = _read_and_compute(program, c, not product.has(Trait.MATMUL), len(addends))
    if pool is None:
        stores = [f"if (inside) store(y{i}, index, r{i});" for i in range(len(results))]
    else:
        found = dict(zip(pool.outputs, ("largest.value", "largest.at"), strict=True))
        stores = [*MAXIMUM, *(f"if (inside) y{i}[index] = {found[v]};" for i, v in enumerate(body.outputs))]
    writes = [*values, *stores]
    writes += [f"return r{body.outputs.index(returned)};"] if returned is not None else []
    result = "void" if returned is None else "Vector<T, WIDE>"
    given, passed = "const T (&value)[WIDE], bool inside = true", "value"
    if addends:
        given = "int column, const T (&value)[WIDE], T (&addends)[SUMS][WIDE], bool inside = true"
        passed = "column, value, addends"
    text = [
        *(['#include "pool/window_max.cuh"'] if pool else []),
        f"struct {name} {{",
        f"    static constexpr int WIDEST = {16 // largest}, SUMS = {len(addends)};",
        *indented(fields),
        "    template <int WIDE> struct Aux {",
        *indented(indented(aux)),
        "    };",
        "    template <int WIDE> __device__ __forceinline__ Aux<WIDE> load_aux(",
        "        int64_t item, int row, int column, int64_t index) const {",
        "        (void)item, (void)row, (void)column, (void)index;",
        *indented(indented(reads)),
        "    }",
        "    __device__ __forceinline__ void prefetch(int64_t index, int count) const {",
        "        (void)index, (void)count;",
        *indented(indented(prefetches)),
        "    }",
        f"    template <int WIDE> __device__ __forceinline__ {result} write(",
        f"        const Aux<WIDE> &aux, int64_t index, {given}) const {{",
        *indented(indented(writes)),
        "    }",
        "    template <int WIDE> __device__ __forceinline__ void operator()(",
        "        int64_t item, int row, int column, int64_t index, const T (&value)[WIDE]) const {",
        *(["        T addends[SUMS][WIDE];"] if addends else []),
        f"        write(load_aux<WIDE>(item, row, column, index), index, {passed});",
        "    }",
        "};",
    ]
    return Epilogue("\n".join(text), inputs, body.outputs)


def _read_and_compute(
    program: Program, c: Variable, images: bool, addends: int
) -> tuple[list[str], list[str], list[str]]:
    """For the epilogue's inputs: struct members, statements that load them, and statements that compute the outputs
    ``r0.lane[k]``, ``r1.lane[k]``, ...

    Args:
        addends: how many of the last outputs are ``addends[0][k]``, ``addends[1][k]``, ... An epilogue with addends
            loads what all rows share just before its use: few elements, which are in L1.
    """
    aux, reads, late = [], ["Aux<WIDE> aux;"], []
    values = {c: "value[k]"}
    batch = c.type.shape[: 1 if images else -2]
    for i, v in enumerate(program.inputs):
        if v is c:
            continue
        shape = c.type.shape
        indices = ("item", len(batch)), ("(int64_t)row", 1), ("column", len(shape) - len(batch) - 1)
        found = access(v.type.shape, shape, *indices)
        place = "index" if v.type.shape == shape else found.place
        wide = "WIDE" if found.step else 1
        if addends and place in ("column", "0"):
            line, values[v] = read(v, f"b{i}", f"x{i}", place, wide)
            late.append(line)
            continue
        aux.append(f"{held(v, wide)} b{i};")
        text = loaded(v, f"x{i}", place, wide)
        reads.append(f"aux.b{i} = {text.replace('load<', 'load_once<', 1) if addends and place == 'index' else text};")
        values[v] = f"aux.{lane(f'b{i}', wide)}"
    writes = vector_results(program, values, "WIDE", addends=addends)
    return aux, [*reads, "return aux;"], [*late, *writes]
