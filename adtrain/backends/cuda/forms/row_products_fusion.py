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

from adtrain.backends.cuda.forms.row_fused_fusion import RowFusion, rowwise
from adtrain.core.axes import Items
from adtrain.core.fused import ROW_PRODUCTS, body_of, fuse
from adtrain.core.precision import FULL
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.target import Target
from adtrain.passes.fuse_elementwise import by_element
from adtrain.passes.fuse_products import fuse_product

ROWS = 16
"""Rows of a thread block: those of a tensor-core instruction."""
MIN_CAPABILITY = (8, 0)
"""Compute capability with bfloat16 on tensor cores."""
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
        return target.capability >= MIN_CAPABILITY

    def copied(self, producer: Equation, reader: Equation) -> bool:
        return producer.has(Trait.RESHAPE) and not reader.has(Trait.RESHAPE)

    def row_wise(self) -> list[Items | None]:
        equations = self.program.equations
        self.single = {i for i, e in enumerate(equations) if e.primitive.name in ATTENTION}
        return _without_epilogues(self.program, [_by_row(e, self.target) for e in equations])

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
    if not e.has(Trait.MATMUL) or e.params["transpose_a"] or e.params["precision"] != FULL:
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
        small = not _is_crowded(e.outputs[0].type.shape[0], target) or e.inputs[1].size <= MAX_CROWDED_WEIGHTS
        found = e.items if is_wide_product(e) and small else None
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


def _without_epilogues(program: Program, found: list[Items | None]) -> list[Items | None]:
    """``found`` with None for elementwise equations that have one result and read a product outside of chains.

    They become its epilogue. An epilogue with several results would write more than the product.
    """
    both = list(zip(program.equations, found, strict=True))
    wide = {v for e, each in both if e.has(Trait.MATMUL) and each is None for v in e.outputs}

    def is_epilogue(e: Equation) -> bool:
        return by_element(e) and len(e.outputs) == 1 and not wide.isdisjoint(e.inputs)

    return [None if is_epilogue(e) else each for e, each in both]


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
