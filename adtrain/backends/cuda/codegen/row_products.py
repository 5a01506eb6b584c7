"""Row-product kernels: each thread block takes a few rows through a chain of products and other row-wise equations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from adtrain.backends.cuda.codegen.loops import flat
from adtrain.backends.cuda.codegen.one_block import WARP, part_of
from adtrain.backends.cuda.codegen.one_block_forms import Form, Names, Step, form_of
from adtrain.backends.cuda.codegen.part import Part, indented
from adtrain.backends.cuda.codegen.row_attention import FORMS as ATTENTION_FORMS
from adtrain.backends.cuda.codegen.row_fused import own_rows
from adtrain.codegen.elementwise import statements, strides
from adtrain.codegen.expressions import c_type
from adtrain.core.fused import body_of, loops_p
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.target import Target
from adtrain.passes.fuse_elementwise import elementwise
from adtrain.passes.fuse_horizontally import is_product
from adtrain.passes.fuse_row_products import STEP, TILE, row_count, rows_per_block, sequence_length, shared_by_blocks
from adtrain.passes.plan_memory import nbytes


@dataclass(frozen=True)
class Block:
    """The thread block of a row-product kernel.

    Attributes:
        threads: how many.
        shared: bytes of shared memory for values.
        inputs: maximum elements of a row of an input that is copied to shared memory while the first equations run.
    """

    threads: int
    shared: int
    inputs: int


BLOCKS = {16: Block(512, 160 << 10, 256), 64: Block(256, 224 << 10, 384)}
"""By rows. A warp holds the sums of all rows, so more rows need threads with more registers."""
STRIPS = (32, 16)
"""Columns of a warp's tile, the preferred first."""
VECTOR = 4
"""Elements that a thread computes at once."""
BATCHES = (4, 2, 1)
"""Vectors whose arguments a thread loads before it computes the first."""


def row_products(equation: Equation, target: Target) -> tuple[Part, int]:
    """The part for a `row_products` equation, and the threads of its blocks."""
    body = body_of(equation)
    count, length = row_count(body), sequence_length(body)
    rows = rows_per_block(count, target)
    block = BLOCKS[rows]

    def part(own: Program, names: dict[Variable, str]) -> Part:
        by_row = set(own.inputs) - shared_by_blocks(own)
        larger = {v for v in by_row if block.threads < v.size <= block.inputs * rows and nbytes(v) % 16 == 0}
        shared = min(block.shared, target.shared)
        return part_of(own, names, block.threads, shared, rows * max_width(own), larger, _form_of)

    made = own_rows(body, {count: rows, count // length: rows // length}, shared_by_blocks(body), part)
    return replace(made, headers=(*made.headers, "gemm/row_product.cuh", "attention/row_attention.cuh")), block.threads


def max_width(body: Program) -> int:
    """Most elements of a row of a value."""
    return max(v.size // v.type.shape[0] for e in body.equations for v in e.outputs if v.type.shape)


def _form_of(equation: Equation) -> Form:
    if is_product(equation):
        return _product
    wide = len(equation.outputs[0].type.shape) == 2 and equation.outputs[0].type.shape[1] % VECTOR == 0
    if wide and (equation.primitive is loops_p or elementwise(equation)):
        return _elementwise
    return ATTENTION_FORMS.get(equation.primitive.name) or _warp_per_row(form_of(equation))


def _warp_per_row(form: Form) -> Form:
    """The same with a warp for each row, also where there are more rows than warps: lanes then read neighbours.

    Several rows in a warp are a multiple of the shared memory's banks apart, so that their lanes would conflict.
    """

    def of_rows(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
        rows = equation.outputs[0].type.shape[0]
        return [
            replace(step, threads=min(step.threads, threads))
            for step in form(equation, names, max(threads, rows * WARP))
        ]

    return of_rows


def _elementwise(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    body = flat(body_of(equation))
    rows, width = body.outputs[0].type.shape
    lines = _Vectors(body, body.inputs, names, {}).loop(threads, width)
    return [Step(lines, min(rows * width // VECTOR, threads))]


def _product(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    """The product by tensor cores, and the elementwise equations after it.

    Without slices of K, a warp passes its sums to these equations from registers. Otherwise the slices' sums are added
    first: two steps, or one step with a loop if the warps do not compute all columns at once.
    """
    body = flat(body_of(equation))
    matmul, *others = body.equations
    (a, b), (c,) = matmul.inputs, matmul.outputs
    (rows, n), k = c.type.shape, a.type.shape[1]
    strip, slices, chunk = _division(rows, n, k, threads // WARP)
    transposed = str(matmul.params["transpose_b"]).lower()
    kind = f"RowProduct<{rows}, {n}, {chunk}, {k}, {transposed}, {slices}, {strip}>"
    product, operands = f"product_{names[body.outputs[0]]}", f"{names[a]}, {names[b]}"
    declared, prefetch = [f"{kind} {product};"], [f"{product}.prefetch(t, {names[b]});"]
    inputs = tuple(dict.fromkeys(v for e in others for v in e.inputs))
    made = {v for e in others for v in e.outputs}
    after = Program((*(v for v in inputs if v not in made and v is not c), c), {}, tuple(others), body.outputs)
    epilogue = _Vectors(after, after.inputs[:-1], names, {c: "sum.lane[k]"})
    busy, first = chunk // strip * slices * WARP, "0" if chunk == n else "first"
    loop = ["#pragma unroll 1", f"for (int first = 0; first < {n}; first += {chunk})"]
    if rows > TILE and slices == 1:
        lines = [
            "{",
            *indented(epilogue.from_registers(f"{product}.multiply_directly", f"t, {operands}, {first}")),
            "}",
        ]
        return [Step(lines if chunk == n else [*loop, *lines], busy, declared=declared, early=prefetch)]
    multiply = f"{product}.multiply(t, {operands}, (T *)partial, {first});"
    result = f"const Vector<T, {VECTOR}> sum = {kind}::result({operands}, (const T *)partial, row, column, {first});"
    added = epilogue.loop(threads, chunk, [result])
    size = slices * rows * chunk * c.type.dtype.itemsize
    if chunk == n:
        return [
            Step([multiply], busy, size, declared=declared, early=prefetch),
            Step(added, min(rows * n // VECTOR, threads)),
        ]
    ahead = f"if (first + {chunk} < {n}) {product}.prefetch(t, {names[b]}, first + {chunk});"
    lines = [*loop, "{", *indented([multiply, "__syncthreads();", ahead, *added, "__syncthreads();"]), "}"]
    return [Step(lines, threads, size, declared=declared, early=prefetch)]


def _division(rows: int, n: int, k: int, warps: int) -> tuple[int, int, int]:
    """Columns of a warp's tile, slices of K, and columns of a chunk, with which the most warps have work.

    Few rows have one chunk: its warps hold the first weights of all columns.
    """
    found = [
        (chunk // strip * slices, strip, chunk, slices)
        for strip in STRIPS
        for chunk in ((n,) if rows == TILE else range(strip, n + 1, strip))
        for slices in range(1, warps + 1)
        if n % chunk == 0 and k // STEP % slices == 0 and chunk // strip * slices <= warps
    ]
    _, strip, chunk, slices = max(found)
    return strip, slices, chunk


class _Vectors:
    """Elementwise equations on rows, for vectors of VECTOR neighbours of a row.

    Args:
        body: the equations.
        inputs: the arguments that are read from memory; ``values`` has the texts of the others.
    """

    def __init__(self, body: Program, inputs: Sequence[Variable], names: Names, values: dict[Variable, str]) -> None:
        self.shape = shape = body.outputs[0].type.shape
        texts = dict(values)
        self.declared: list[str] = []
        self.loads: list[str] = []
        for i, v in enumerate(inputs):
            down, across = strides(v.type.shape, shape)
            c = c_type(v.type.dtype)
            place = " + ".join([*([f"row * {down}"] if down else []), *(["column"] if across else [])]) or "0"
            kind, read = (f"Vector<{c}, {VECTOR}>", f"load<{c}, {VECTOR}>({names[v]} + {place})")
            if not across:
                kind, read = c, f"{names[v]}[{place}]"
            self.declared.append(f"{kind} b{i}[BATCH];")
            self.loads.append(f"b{i}[j] = {read};")
            texts[v] = f"b{i}[j].lane[k]" if across else f"b{i}[j]"
        self.computation = [
            *(f"Vector<{c_type(v.type.dtype)}, {VECTOR}> r{i};" for i, v in enumerate(body.outputs)),
            "#pragma unroll",
            f"for (int k = 0; k < {VECTOR}; k++) {{",
            *indented(statements(body, texts, [f"r{i}.lane[k]" for i in range(len(body.outputs))])),
            "}",
            *(f"store({names[v]}, row * {shape[1]} + column, r{i});" for i, v in enumerate(body.outputs)),
        ]

    def loop(self, threads: int, chunk: int, before: Sequence[str] = ()) -> Sequence[str]:
        """A loop over the vectors of all rows. A thread loads the arguments of a batch before it computes the first.

        Args:
            chunk: columns that are computed, those from `first` on if these are not all.
            before: statements before the computation.
        """
        count, across = self.shape[0] * chunk // VECTOR, chunk // VECTOR
        batch = next(n for n in BATCHES if count % (n * threads) == 0 or n == 1)
        column = f"at % {across} * {VECTOR}" + ("" if chunk == self.shape[1] else " + first")
        position = [
            f"const int at = i + j * THREADS, row = at / {across}, column = {column};",
            "(void)row, (void)column;",
        ]
        each = ["#pragma unroll", "for (int j = 0; j < BATCH; j++) {"]
        lines = [
            f"constexpr int BATCH = {batch};",
            *self.declared,
            *([*each, *indented([*position, *self.loads]), "}"] if self.loads else []),
            *each,
            *indented([*position, *before, *self.computation]),
            "}",
        ]
        return [f"for (int i = t; i < {count}; i += {batch} * THREADS) {{", *indented(lines), "}"]

    def from_registers(self, function: str, arguments: str) -> Sequence[str]:
        """A call of a product's function with the computation of its elements, as functions of their places."""
        return [
            f"constexpr int BATCH = {BATCHES[0]};",
            *self.declared,
            f"{function}<BATCH>({arguments},",
            "    [&](int j, int row, int column) {",
            "        (void)j, (void)row, (void)column;",
            *indented(indented(self.loads)),
            "    },",
            f"    [&](int j, int row, int column, const Vector<T, {VECTOR}> &sum) {{",
            "        (void)j;",
            *indented(indented(self.computation)),
            "    });",
        ]
