"""Row-product kernels: each thread block takes a few rows through a chain of products and other row-wise equations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from adtrain.backends.cuda.codegen.block_steps import Names, Step, StepRule, loop
from adtrain.backends.cuda.codegen.loops import flat
from adtrain.backends.cuda.codegen.one_block_forms import form_of
from adtrain.backends.cuda.codegen.part import Kernel, Part, kernel
from adtrain.backends.cuda.codegen.row_attention import FORMS as ATTENTION_FORMS
from adtrain.backends.cuda.codegen.row_attention import WARP
from adtrain.backends.cuda.forms.form import Form, define
from adtrain.backends.cuda.forms.horizontal_fusion import is_product
from adtrain.backends.cuda.forms.one_block import part_of
from adtrain.backends.cuda.forms.row_fused import own_rows
from adtrain.backends.cuda.forms.row_products_fusion import ROWS, STEP, row_count, sequence_length, shared_by_blocks
from adtrain.codegen.access import access, read, vector_results
from adtrain.core.fused import ROW_PRODUCTS, body_of
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.target import Target
from adtrain.passes.fuse_elementwise import by_element
from adtrain.passes.places import nbytes

THREADS = 512
"""Threads of a block."""
CROWDED_THREADS, CROWDED_RESIDENT = 256, 2
"""The same with more blocks than multiprocessors; blocks for which a multiprocessor must then have registers."""
STRIPS = (32, 16)
"""Columns of a warp's tile, the preferred first."""
SHARED = 160 << 10
"""Bytes of shared memory for values."""
MAX_COPIED = 256 * ROWS
"""Maximum elements of an input that is copied to shared memory while the first equations run."""
VECTOR = 4
"""Elements that a thread computes at once."""


def row_products_kernel(equation: Equation, target: Target) -> Kernel:
    """The kernel of a `row_products` equation."""
    crowded = row_count(body_of(equation)) // ROWS > target.multiprocessors
    threads = CROWDED_THREADS if crowded else THREADS
    return kernel(
        "row_products", [row_products(equation, threads)], threads, "float", CROWDED_RESIDENT if crowded else 1
    )


def row_products(equation: Equation, threads: int) -> Part:
    """The part for a `row_products` equation."""
    body = body_of(equation)
    count, length = row_count(body), sequence_length(body)

    def part(own: Program, names: dict[Variable, str]) -> Part:
        rows = set(own.inputs) - shared_by_blocks(own)
        larger = {v for v in rows if threads < v.size <= MAX_COPIED and nbytes(v) % 16 == 0}
        return part_of(own, names, threads, SHARED, ROWS * max_width(own), larger, _form_of)

    made = own_rows(body, {count: ROWS, count // length: ROWS // length}, shared_by_blocks(body), part)
    return replace(made, headers=(*made.headers, "gemm/row_product.cuh", "attention/row_attention.cuh"))


def max_width(body: Program) -> int:
    """Most elements of a row of a value."""
    return max(v.size // v.type.shape[0] for e in body.equations for v in e.outputs if v.type.shape)


def _form_of(equation: Equation) -> StepRule:
    if is_product(equation):
        return _product
    wide = len(equation.outputs[0].type.shape) == 2 and equation.outputs[0].type.shape[1] % VECTOR == 0
    if wide and by_element(equation):
        return _elementwise
    return ATTENTION_FORMS.get(equation.primitive.name) or form_of(equation)


def _elementwise(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    body = flat(body_of(equation))
    return [_vectors(body, body.inputs, names, {}, [], threads)]


def _product(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    """Two steps: partial sums of the product by tensor cores; their sums and the elementwise equations after it."""
    body = flat(body_of(equation))
    matmul, *others = body.equations
    (a, b), (c,) = matmul.inputs, matmul.outputs
    n, k = c.type.shape[1], a.type.shape[1]
    strip, slices = _division(n, k, threads // WARP)
    transposed = str(matmul.params["transpose_b"]).lower()
    kind = f"RowProduct<{ROWS}, {n}, {k}, {transposed}, {slices}, {strip}>"
    size = slices * ROWS * n * c.type.dtype.itemsize
    product = f"product_{names[body.outputs[0]]}"
    multiply = [f"{product}.multiply(t, {names[a]}, {names[b]}, (T *)partial);"]
    prefetch = [f"{product}.prefetch(t, {names[b]});"]
    result = f"const Vector<T, {VECTOR}> sum = {kind}::result({names[a]}, {names[b]}, (T *)partial, row, column);"
    inputs = tuple(dict.fromkeys(v for e in others for v in e.inputs))
    made = {v for e in others for v in e.outputs}
    after = Program((*(v for v in inputs if v not in made and v is not c), c), {}, tuple(others), body.outputs)
    return [
        Step(multiply, n // strip * slices * WARP, size, declared=[f"{kind} {product};"], early=prefetch),
        _vectors(after, after.inputs[:-1], names, {c: "sum.lane[k]"}, [result], threads),
    ]


def _division(n: int, k: int, warps: int) -> tuple[int, int]:
    """Columns of a warp's tile, and slices of K, with which most of `warps` warps have work."""

    def most_slices(strip: int) -> int:
        counts = [s for s in range(1, warps + 1) if k // STEP % s == 0 and n // strip * s <= warps]
        return max(counts, default=0)

    slices = {strip: most_slices(strip) for strip in STRIPS}
    _, strip = max((n // strip * count, strip) for strip, count in slices.items() if count)
    return strip, slices[strip]


def _vectors(
    body: Program,
    inputs: Sequence[Variable],
    names: Names,
    values: dict[Variable, str],
    before: Sequence[str],
    threads: int,
) -> Step:
    """A loop over vectors of elements of rows; a thread computes VECTOR neighbours of a row at once.

    Args:
        inputs: the arguments that are read from memory; ``values`` has the texts of the others.
        before: statements before the loads.
    """
    shape = body.outputs[0].type.shape
    count, width = prod(shape) // VECTOR, shape[1] // VECTOR
    texts, loads = dict(values), []
    for i, v in enumerate(inputs):
        found = access(v.type.shape, shape, ("row", 1), ("column", 1))
        place = f"i * {VECTOR}" if v.size == prod(shape) else found.place
        line, texts[v] = read(v, f"b{i}", names[v], place, VECTOR if found.step else 1)
        loads.append(line)
    lines = [
        f"const int row = i / {width}, column = i % {width} * {VECTOR};",
        "(void)row, (void)column;",
        *before,
        *loads,
        *vector_results(body, texts, VECTOR),
        *(f"store({names[v]}, i * {VECTOR}, r{i});" for i, v in enumerate(body.outputs)),
    ]
    # The warps wait until instructions are fetched, so an epilogue, which is long, is not unrolled.
    return loop(count, lines, threads, unrolled=1 if before else 4)


define(Form(ROW_PRODUCTS, lambda equation, lowering: [row_products_kernel(equation, lowering.target)]))
