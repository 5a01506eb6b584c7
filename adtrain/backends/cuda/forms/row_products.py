"""Row-product fusion: a chain of linear layers, norms, activations and residual additions on few rows as one kernel.

A thread block takes ROWS rows through all equations of the chain, with products on tensor cores. Values between
equations stay in shared memory, and each block reads every weight. With few rows this costs less than a launch for each
equation. In a transformer everything between two attentions is one such chain, forward and backward. Sequences of up to
ROWS rows lie within a block, so their attention is part of the chain. A chain has at most one attention, so that layers
have equal kernels. With many rows only an attention and the small products and norms after it are a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from adtrain.backends.cuda.codegen.block_rules import rule_of
from adtrain.backends.cuda.codegen.loops import flat
from adtrain.backends.cuda.codegen.part import Kernel, Names, Part, Step, StepRule, kernel, loop
from adtrain.backends.cuda.forms import Form, define
from adtrain.backends.cuda.forms.horizontal import is_product
from adtrain.backends.cuda.forms.one_block import part_of
from adtrain.backends.cuda.forms.row_fused import RowFusion, own_rows, rowwise, without_epilogues
from adtrain.codegen.elementwise import access, literal, read, vector_results
from adtrain.core.axes import Items
from adtrain.core.kernel import TENSOR_CORES, WARP, Target
from adtrain.core.precision import FULL
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable, arguments_of, body_of, fuse
from adtrain.passes.fusion import by_element, fuse_product

ROW_PRODUCTS = "row_products"
"""A chain of products and other row-wise equations. Each thread block of a GPU takes a few rows through it."""

ROWS = 16
"""Rows of a thread block: those of a tensor-core instruction."""
MAX_WIDTH = 1024
"""Maximum elements of a row."""
MAX_WEIGHT = 1 << 17
"""Maximum elements of a weight, which every block reads."""
MAX_CROWDED_WEIGHTS = 1 << 14
"""Maximum elements of all weights of a chain with more blocks than multiprocessors."""
MAX_BLOCKS = 8
"""Maximum blocks for each multiprocessor."""
ATTENTION = {"self_attention": 1, "self_attention_grad": 4}
"""The primitives that work on sequences, and their number of arguments without mask and random numbers."""
MAX_LENGTH = 16
"""Maximum rows of a sequence: those of a tile."""
MAX_HEAD_WIDTH = 64
"""Maximum columns of a head in such a kernel."""
STRIP, STEP = 32, 16
"""Columns and K of a warp's tile; a weight's lengths are multiples of them."""


class RowProductsFusion(RowFusion):
    """Each connected group of row-wise equations with wide products.

    Each reader of a reshape computes it: inside a kernel a reshape is not stored.
    """

    form = ROW_PRODUCTS
    in_order = True  # so that the layers of a network have equal kernels: vit at batch 128 takes 1.2% less time

    @classmethod
    def runs_on(cls, target: Target) -> bool:
        return target.capability >= TENSOR_CORES

    def copied(self, producer: Equation, reader: Equation) -> bool:
        return producer.has(Trait.RESHAPE) and not reader.has(Trait.RESHAPE)

    def row_wise(self) -> list[Items | None]:
        found = [_by_row(e, self.target) for e in self.program.equations]
        return without_epilogues(self.program, found, by_element)

    def fits_rows(self, members: Sequence[int]) -> bool:
        return sum(self.program.equations[i].primitive.name in ATTENTION for i in members) <= 1

    def saves(self, equations: Sequence[Equation]) -> bool:
        return _is_chain(equations, self.target)

    def fused(self, equations: Sequence[Equation], needed: Sequence[Variable]) -> Equation:
        chain = fuse(ROW_PRODUCTS, equations, needed)
        return replace(chain, params={**chain.params, "body": fuse_product(chain.params["body"])})


def fits(count: int, target: Target) -> bool:
    """Whether `count` rows make blocks for at least half of the multiprocessors, and not too many."""
    return count % ROWS == 0 and target.multiprocessors // 2 <= count // ROWS <= MAX_BLOCKS * target.multiprocessors


def _is_crowded(count: int, target: Target) -> bool:
    """Whether `count` rows make more blocks than there are multiprocessors. Then weights are read more often."""
    return count // ROWS > target.multiprocessors


def may_join(e: Equation, target: Target) -> bool:
    """Whether a product, or attention, can be part of a chain."""
    return (e.has(Trait.MATMUL) or e.primitive.name in ATTENTION) and _by_row(e, target) is not None


def is_wide_product(equation: Equation) -> bool:
    """Whether a row-product kernel computes a product by tensor cores: rows by a weight that all blocks read."""
    e = equation
    if not e.has(Trait.MATMUL) or e.params["precision"] != FULL or e.params["transpose_a"]:
        return False
    a, b = e.inputs
    if len(a.type.shape) != 2 or a is b or a.type.dtype.name != "float32" or b.size > MAX_WEIGHT:
        return False
    (_, k), n = a.type.shape, e.outputs[0].type.shape[1]
    return n % STRIP == 0 and k % STEP == 0 and max(n, k) <= MAX_WIDTH


def row_count(body: Program) -> int:
    """The rows of a `row_products` body."""
    return next(e.outputs[0].type.shape[0] for e in _inner(body) if e.has(Trait.MATMUL))


def sequence_length(body: Program) -> int:
    """The rows of a sequence, where equations of a `row_products` body work on sequences; otherwise 1."""
    shapes = (e.outputs[0].type.shape for e in _inner(body))
    lengths = (e.inputs[0].type.shape[1] for e in _inner(body) if e.primitive.name in ATTENTION)
    return next(lengths, next((shape[1] for shape in shapes if len(shape) == 3), 1))


def shared_by_blocks(body: Program) -> set[Variable]:
    """The inputs of a `row_products` body that every thread block reads completely."""
    weights = {e.inputs[1] for e in _inner(body) if e.has(Trait.MATMUL)}
    leading = {row_count(body), row_count(body) // sequence_length(body)}
    by_row = {v for v in body.inputs if len(v.type.shape) > 1 and v.type.shape[0] in leading}
    return set(body.inputs) - by_row | weights


def _inner(body: Program) -> list[Equation]:
    return [e for fused in body.equations for e in body_of(fused).equations]


def _by_row(e: Equation, target: Target) -> Items | None:
    """How an equation works row by row, where such a kernel computes it; None elsewhere."""
    if e.has(Trait.MATMUL):
        rows, columns = e.outputs[0].type.shape[-2:] if is_wide_product(e) else (0, 0)
        small = not _is_crowded(rows, target) or e.inputs[1].size <= MAX_CROWDED_WEIGHTS
        found = e.items if 0 < columns <= STRIP * threads_of(rows, target) // WARP and small else None
    else:
        found = rowwise(e)
    length = _length_of_sequences(e)
    if length:
        found = Items(prod(e.inputs[0].type.shape[:-1]), (True,) * len(e.inputs))
    elif found is not None and _is_on_sequences(e):
        length = e.outputs[0].type.shape[1]
        found = replace(found, count=found.count * length)
    elif found is not None and any(len(v.type.shape) > 2 for v in (*e.inputs, *e.outputs)):
        return None
    if found is None or not fits(found.count, target) or ROWS % (length or 1):
        return None
    by_row = [v for v, flag in zip(e.inputs, found.flags, strict=True) if flag]
    wide = any(v.size > MAX_WIDTH * found.count for v in (*by_row, *e.outputs))
    return None if wide else found


def _length_of_sequences(e: Equation) -> int:
    """The rows of a sequence, for attention and reshapes between sequences and their rows; otherwise 0."""
    if e.has(Trait.RESHAPE):
        flat, whole = sorted((e.inputs[0].type.shape, e.outputs[0].type.shape), key=len)
        return whole[1] if len(flat) == 2 and len(whole) == 3 and flat[1] == whole[2] and whole[1] <= MAX_LENGTH else 0
    if e.primitive.name not in ATTENTION or e.params["dropout"] or e.params["precision"] != FULL:
        return 0
    x = e.inputs[0].type
    if len(e.inputs) != ATTENTION[e.primitive.name] or x.dtype.name != "float32" or len(x.shape) != 3:
        return 0
    width = x.shape[2] // (3 * e.params["heads"])
    return x.shape[1] if width <= MAX_HEAD_WIDTH and width % STEP == 0 and x.shape[1] <= MAX_LENGTH else 0


def _is_on_sequences(e: Equation) -> bool:
    """Whether the equation is elementwise on short sequences, and all sequences share its other inputs."""
    shape = e.outputs[0].type.shape
    if not by_element(e) or len(shape) != 3 or not 1 < shape[1] <= MAX_LENGTH:
        return False
    others = [v.type.shape for v in e.inputs if v.type.shape != shape]
    leading = {shape[0], shape[0] * shape[1]}  # of arrays by sequence and by row
    return all(v.type.shape == shape for v in e.outputs) and not any(x and x[0] in leading for x in others)


def _is_chain(equations: Sequence[Equation], target: Target) -> bool:
    """Whether the equations are several launches, and some are products. With more blocks than multiprocessors one must
    be an attention: its gradient is faster in a kernel of its own."""
    launches = [e for e in equations if not e.has(Trait.RESHAPE)]
    products = [e for e in launches if e.has(Trait.MATMUL)]
    if len(launches) == 1 or not products:
        return False
    if not _is_crowded(products[0].outputs[0].type.shape[0], target):
        return True
    attention = any(e.primitive.name == "self_attention" for e in launches)
    return attention and sum(e.inputs[1].size for e in products) <= MAX_CROWDED_WEIGHTS


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


def threads_of(rows: int, target: Target) -> int:
    """Threads of a block. Each warp computes a strip of columns of a product, or a part of K for one."""
    return CROWDED_THREADS if _is_crowded(rows, target) else THREADS


def row_products(equation: Equation, target: Target) -> Kernel:
    """The kernel of a `row_products` equation."""
    body = body_of(equation)
    count, length = row_count(body), sequence_length(body)
    threads, resident = threads_of(count, target), CROWDED_RESIDENT if _is_crowded(count, target) else 1

    def part(own: Program, names: dict[Variable, str]) -> Part:
        rows = set(own.inputs) - shared_by_blocks(own)
        larger = {v for v in rows if threads < v.size <= MAX_COPIED and v.nbytes % 16 == 0}
        widest = max(v.size // v.type.shape[0] for e in own.equations for v in e.outputs if v.type.shape)
        return part_of(own, names, threads, SHARED, ROWS * widest, larger, _rule_of)

    made = own_rows(body, {count: ROWS, count // length: ROWS // length}, shared_by_blocks(body), part)
    made = replace(made, headers=(*made.headers, "gemm/row_product.cuh", "attention/row_attention.cuh"))
    return kernel("row_products", [made], threads, "float", resident)


def _rule_of(equation: Equation) -> StepRule:
    if is_product(equation):
        return _product
    wide = len(equation.outputs[0].type.shape) == 2 and equation.outputs[0].type.shape[1] % VECTOR == 0
    if wide and by_element(equation):
        return _elementwise
    return _attention if equation.primitive.name in ATTENTION else rule_of(equation)


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
    after = Program((*(v for v in arguments_of(others) if v is not c), c), {}, tuple(others), body.outputs)
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


TILE = 16
"""Rows of a head that a warp computes (`kernels/cuda/attention/row_attention.cuh`)."""


def _attention(equation: Equation, names: Names, threads: int) -> Sequence[Step]:
    """The step of an attention or of its gradient. The rows of a block are whole sequences."""
    x = equation.inputs[0]
    sequences, length, row = x.type.shape
    heads = equation.params["heads"]
    causal = str(equation.params["causal"]).lower()
    kind = f"RowAttention<{sequences * length}, {length}, {heads}, {row // (3 * heads)}, {causal}>"
    pointers = [names[v] for v in (*equation.inputs, *equation.outputs)]
    arguments = ", ".join([*pointers, "(T *)partial", f"(T){literal(equation.params['scale'])}"])
    function = "forward" if equation.primitive.name == "self_attention" else "backward"
    tiles = sequences * length // TILE * heads
    size = tiles * 3 * TILE * TILE * x.type.dtype.itemsize
    return [Step([f"{kind}::{function}<THREADS>(t, {arguments});"], tiles * WARP, size)]


define(Form(ROW_PRODUCTS, lambda equation, target: [row_products(equation, target)]))
