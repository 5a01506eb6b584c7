"""Products whose epilogue also adds the columns of its results: the sums of a batch norm, the gradient of a bias.

The epilogue of a convolution in bfloat16 or tf32, or of a product in bfloat16, computes the addends of the sums from
its results as they are stored, and from other arrays. Each block adds those of all its tiles, in a fixed order. A
second, small launch adds the sums of all blocks, and computes what follows, such as the mean and variance. So no other
kernel reads the results again for the statistics of a batch norm, or for the sums that its derivative needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod

from adtrain.backends.cuda.codegen.loops import Epilogue, epilogue_of, flat, matmul_of
from adtrain.backends.cuda.codegen.part import Kernel, Part, indented, kernel
from adtrain.backends.cuda.forms import Form, define
from adtrain.backends.cuda.forms.column_sum import (
    BLOCK_COLUMNS,
    COLUMN_SUM,
    MAX_SUMS,
    THREADS,
    TOTAL,
    VECTOR,
    around_totals,
    shared_bytes,
    sums_columns,
    sums_of,
)
from adtrain.backends.cuda.write_channels_last import IMAGES
from adtrain.core.kernel import CudaKernel, Target, cuda_kernels
from adtrain.core.program import PRODUCT, Equation, Program, Variable, body_of, fuse
from adtrain.core.types import BITS
from adtrain.lowering.cuda.conv import depthwise
from adtrain.lowering.cuda.gemm.bfloat16 import BYTES_PER_CYCLE, with_column_sums
from adtrain.passes.fusion import Fusion, elementwise
from adtrain.passes.groups import Groups

PRODUCT_SUMS = "product_sums"
"""A convolution or product with an elementwise epilogue, and sums over the rows of what the epilogue computes."""
OF_TF32 = frozenset(("conv2d_tf32", "conv2d_input_grad_tf32"))
"""Primitives of channels-last convolutions in tf32 whose results are images."""


class ProductSumsFusion(Fusion):
    """A convolution or product in bfloat16, or a convolution in tf32, with its epilogue, and the column sums that read
    its results."""

    form = PRODUCT_SUMS
    early = True

    @classmethod
    def runs_on(cls, target: Target) -> bool:
        return not target.by_member

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        product, e = groups.equations[producer], groups.equations[reader]
        adds, alone = e.form == COLUMN_SUM or sums_columns(e), len(groups.members[groups.of[reader]]) == 1
        if not (adds and alone and _is_product(product)):
            return False
        others = [groups.equations[i] for i in groups.members[groups.of[producer]] if i != producer]
        types = [total.inputs[0].type for x in (*others, e) for total in sums_of(x).totals]
        if len(types) > MAX_SUMS or len(set(types)) > 1 or not _adds_columns(e, value):
            return False
        itemsize = BITS.itemsize if _rounds(product) else value.type.dtype.itemsize
        read = sum(v.size for v in e.inputs if v.type.shape == value.type.shape) * itemsize
        return self._cycles(product, len(types)) - self._cycles(product, 0) <= read / BYTES_PER_CYCLE

    def _cycles(self, product: Equation, sums: int) -> float:
        """The estimated time of a product by the kernels that can add `sums` sums."""
        kernels = _kernels(product, sums, 0, self.target)
        return min((x.cycles for x in kernels if x.cycles is not None), default=inf)

    def fused(self, equations: Sequence[Equation], needed: Sequence[Variable]) -> Equation:
        product, *others = equations
        sums = fuse(COLUMN_SUM, [x for e in others for x in body_of(e).equations], needed)
        return fuse(PRODUCT_SUMS, [*body_of(product).equations, sums], needed)


def _is_product(e: Equation) -> bool:
    """Whether it is a convolution or input gradient of one term, or a product of matrices of bfloat16, with or without
    an epilogue."""
    named = _rounds(e) or matmul_of(e).primitive.name in OF_TF32
    return named and (matmul_of(e) is e or e.form == PRODUCT)


def _rounds(e: Equation) -> bool:
    """Whether its results, and the images that its epilogue reads, are bfloat16 in memory."""
    return matmul_of(e).primitive.name in {*IMAGES, "matmul_bfloat16"}


def _adds_columns(e: Equation, result: Variable) -> bool:
    """Whether the addends of column sums are computed element by element from a product's results, and other arguments
    have the shape of these or one value for a column."""
    found, shape = sums_of(e), result.type.shape
    made = {v for x in found.before for v in x.outputs}
    read = {*found.addends, *(v for x in found.before for v in x.inputs)} - made
    fits = all(v.type.shape == shape or prod(v.type.shape[:-1]) == 1 for v in read)
    return fits and all(map(elementwise, found.before)) and all(v.type.shape == shape for v in found.addends)


def _kernels(product: Equation, sums: int, read: int, target: Target) -> Sequence[CudaKernel]:
    """The kernels of a product.

    Args:
        sums: the number of sums in the epilogue; 0: also kernels that cannot add.
        read: bytes of auxiliary inputs that the epilogue reads for an element.
    """
    e = matmul_of(product)
    found = cuda_kernels(e.name, target, *(v.type for v in e.inputs), **e.kernel_params)
    if not sums:
        return found
    columns = e.outputs[0].type.shape[-1]
    if "window" in e.params and e.params["window"].groups > 1:
        return [depthwise.with_column_sums(each, columns, sums) for each in found]
    return [x for each in found if (x := with_column_sums(each, columns, sums, read)) is not None]


def _candidates(equation: Equation, target: Target) -> Sequence[CudaKernel]:
    """The kernels of a product with its sums, the fastest by estimate first."""
    product = matmul_of(equation)
    arrays = (v for v in equation.inputs if v not in product.inputs and v.type.shape == product.outputs[0].type.shape)
    read = sum(v.type.dtype.itemsize for v in arrays)
    found = _kernels(equation, len(sums_of(_sums(equation)).totals), read, target)
    return sorted(found, key=lambda kernel: kernel.cycles or 0)


def _sums(equation: Equation) -> Equation:
    """The `column_sum` equation in the body."""
    return body_of(equation).equations[-1]


def _epilogue(equation: Equation) -> Epilogue:
    """The epilogue of the product: it stores results, and computes the addends of the sums."""
    *product, e = flat(body_of(equation)).equations
    sums, stored = sums_of(e), [v for v in equation.outputs if v not in e.outputs]
    return epilogue_of(Program(equation.inputs, {}, (*product, *sums.before), tuple(stored)), addends=sums.addends)


def _column_totals(equation: Equation, product: CudaKernel) -> list[Kernel]:
    """The launch that adds the sums of all blocks, and computes what follows."""
    e = _sums(equation)
    sums = sums_of(e)
    totals = {v for total in sums.totals for v in total.outputs}
    inputs = [v for v in sums.after.inputs if v not in totals]
    names = {v: f"x{i}" for i, v in enumerate(inputs)}
    columns, count = sums.totals[0].outputs[0].size, len(sums.totals)
    loads, compute = around_totals(e, names)
    assert product.scratch is not None
    rows = product.scratch // (count * columns * sums.addends[0].type.dtype.itemsize)
    lines = [
        f"constexpr int ROWS = {rows}, COLUMNS = {columns}, WIDE = {VECTOR}, SUMS = {count};",
        f"const int column = min(block * {BLOCK_COLUMNS} + (int)threadIdx.x, COLUMNS - 1);",
        *loads,
        f"ColumnSum<float, THREADS, {BLOCK_COLUMNS}, WIDE, SUMS, {shared_bytes(THREADS, BLOCK_COLUMNS)}> sum(block);",
        "sum.add_rows<ROWS, COLUMNS>([&](int row, int column, float (&addends)[SUMS][WIDE]) {",
        "    for (int n = 0; n < SUMS; n++) {",
        "        const auto v = load<float, WIDE>((const float *)own + (row * SUMS + n) * COLUMNS + column);",
        "        for (int k = 0; k < WIDE; k++) addends[n][k] = v.lane[k];",
        "    }",
        "});",
        f"sum.finish<COLUMNS>([&](int column, const {TOTAL} (&totals)[SUMS]) {{",
        *indented(compute),
        "});",
    ]
    part = Part(
        lines,
        inputs,
        e.outputs,
        ("common/common.cuh", "reduce/column_sum.cuh"),
        blocks=-(-columns // BLOCK_COLUMNS),
        shared=shared_bytes(THREADS, BLOCK_COLUMNS),
        scratch=product.scratch,
    )
    return [kernel("column_totals", [part], THREADS)]


define(Form(PRODUCT_SUMS, candidates=_candidates, timed=matmul_of, epilogue=_epilogue, after=_column_totals))
