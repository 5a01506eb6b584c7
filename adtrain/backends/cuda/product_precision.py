"""The precision of products: which ones keep rounded operands, and which of these are stored as bfloat16.

A rounded precision permits rounding and does not require it. Kernels of full precision take part in more fusions, and
some are as fast. So `choose_precision` gives a product full precision if it can be part of a row-product chain
(`forms/row_products.py`), or if it is narrow and threads can compute its items (`forms/thread_items.py`). Any other
product keeps its rounded precision if it will read a bfloat16 copy, or if its kernel is estimated faster by the time of
a launch.

`store_bfloat16` stores the operands of large products of precision bfloat16 as bfloat16:

matmul(x, w)    ->    matmul_bfloat16(to_bfloat16(x), to_bfloat16(w))

A conversion is an elementwise equation beside the equation that computes its argument, so it joins that kernel: an
epilogue stores the rounded activation or gradient. All products that read an array share its copy. So do products of
few FLOPs, if the array is large, such as those with the small matrices of a low-rank adaptation. If an operand is a
reshape, the argument of the reshape is converted.

If an array is read by such products, by comparisons with 0 and by sums over its rows only, these read the copy as well
and the float32 array is never stored. So the mask of relu follows from the rounded activation, and the gradient of a
bias sums rounded gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from adtrain.backends.cuda.forms.column_sum import sums_columns
from adtrain.backends.cuda.forms.horizontal import MAX_FLOPS
from adtrain.backends.cuda.forms.row_products import may_join
from adtrain.backends.cuda.forms.thread_items import is_narrow
from adtrain.backends.cuda.write_channels_last import OF_TERMS
from adtrain.core.array import Array
from adtrain.core.kernel import Target, cuda_kernels
from adtrain.core.precision import FULL
from adtrain.core.primitive import PRIMITIVES, Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.core.types import BITS, ArrayType, Shape
from adtrain.lowering.cuda.gemm.narrow import COLUMNS

ROW = 8
"""Kernels need rows of multiples of 16 bytes, which are ROW elements. M and N are padded to such multiples, not K."""

MIN_SHARED = 1 << 20
"""Minimum elements of an operand whose bfloat16 copy products of few FLOPs read, too, if a large product reads it."""
MIN_READ = 1 << 23
"""Minimum elements of an operand whose bfloat16 copy is worth it for a narrow product alone. With the copy the product
reads 16 MiB less, which is the time of two launches."""


@keeps(Results.EXACT)
def store_bfloat16(program: Program, target: Target) -> Program:
    """``program`` with bfloat16 copies of the operands of large bfloat16 products, if the GPU has kernels for them."""
    products = products_of_copies(program, target)
    reshapes = {v: e for e in program.equations if e.has(Trait.RESHAPE) for v in e.outputs}
    operands = dict.fromkeys(v for e in products for v in e.inputs)
    sources = {v: reshapes[v].inputs[0] if v in reshapes else v for v in operands}
    copies = {v: v.like(ArrayType(v.type.shape, BITS)) for v in (*operands, *sources.values())}
    replaced = {v for v in operands if v not in program.outputs and _needs_copy_only(program, v, products)}
    padded: dict[tuple[Variable, Shape], Variable] = {}
    equations: list[Equation] = []
    made: set[Variable] = set()

    def convert(v: Variable, beside: Equation) -> None:
        if v in made:
            return
        made.add(v)
        source = sources.get(v, v)
        if source is not v:
            convert(source, beside)
            equations.append(replace(reshapes[v], inputs=(copies[source],), outputs=(copies[v],)))
        else:
            equations.append(_beside(beside, "to_bfloat16", v, copies[v]))

    def operand(v: Variable, shape: Shape, beside: Equation) -> Variable:
        convert(v, beside)
        if shape == v.type.shape:
            return copies[v]
        if (v, shape) not in padded:
            out = padded[v, shape] = v.like(ArrayType(shape, BITS))
            high = tuple(after - before for before, after in zip(v.type.shape, shape, strict=True))
            none = (0,) * len(shape)
            equations.append(_beside(beside, "pad", copies[v], out, low=none, high=high, gaps=none, value=0))
        return padded[v, shape]

    for e in program.equations:
        if e in products:
            inputs = tuple(operand(v, shape, e) for v, shape in zip(e.inputs, products[e], strict=True))
            equations += _product(e, inputs)
        elif read := replaced.intersection(e.inputs):
            for v in read:  # an input of the program may have no copy yet
                convert(v, e)
            floats = {v: v.like() for v in read}
            equations += [_beside(e, "from_bfloat16", copies[v], own) for v, own in floats.items()]
            equations.append(e.renamed_inputs(floats))
        else:
            equations.append(e)
        for v in e.outputs:
            if v in copies:
                convert(v, e)
    return replace(program, equations=tuple(equations))


def _beside(e: Equation, name: str, v: Variable, out: Variable, **params: object) -> Equation:
    """An equation of a primitive, with the scope and phase of `e`."""
    return Equation(PRIMITIVES[name], (v,), params, (out,), e.scope, e.phase)


def _product(e: Equation, inputs: tuple[Variable, ...]) -> list[Equation]:
    """The product of the copies, and the part of its result without padding: a view if only rows were added."""
    primitive, (out,) = PRIMITIVES["matmul_bfloat16"], e.outputs
    (found,) = primitive.output_types([v.type for v in inputs], e.params)
    if found == out.type:
        return [replace(e, primitive=primitive, inputs=inputs)]
    whole = Variable(found, out.device)
    shape = out.type.shape
    if len(shape) == 2 and found.shape[1] == shape[1]:
        part = _beside(e, "subview", whole, out, start=0, shape=shape)
    else:
        part = _beside(e, "slice", whole, out, starts=(0,) * len(shape), stops=shape, steps=(1,) * len(shape))
    return [replace(e, primitive=primitive, inputs=inputs, outputs=(whole,)), part]


def products_of_copies(program: Program, target: Target) -> dict[Equation, tuple[Shape, ...]]:
    """The products whose operands are copied to bfloat16, with the padded shapes of these operands.

    They have many FLOPs, or are narrow and bound by the reads of a large operand, or share a large operand with such
    products.
    """
    fitting = {e: shapes for e in program.equations if (shapes := _stored_shapes(e, target))}
    large = {e for e in fitting if e.cost.flops > MAX_FLOPS or _reads_much(e)}
    shared = {v for e in large for v in e.inputs if v.size >= MIN_SHARED}
    return {e: shapes for e, shapes in fitting.items() if e in large or shared.intersection(e.inputs)}


def _reads_much(e: Equation) -> bool:
    """Whether a product is narrow and has a large operand."""
    few = min(e.outputs[0].type.shape[-2:]) <= COLUMNS[-1]
    return few and max(v.size for v in e.inputs) >= MIN_READ


def _stored_shapes(e: Equation, target: Target) -> tuple[Shape, ...]:
    """The padded shapes of the operands of a bfloat16 product; () if it is none, or if it has no kernel."""
    if not e.has(Trait.MATMUL) or e.params["precision"] != "bfloat16" or e.inputs[0].type.dtype != np.float32:
        return ()
    a, b = (v.type.shape for v in e.inputs)
    if e.params["transpose_a"]:
        a = (*a[:-1], -(-a[-1] // ROW) * ROW)
    if not e.params["transpose_b"]:
        b = (*b[:-1], -(-b[-1] // ROW) * ROW)
    types = ArrayType(a, BITS), ArrayType(b, BITS)
    return (a, b) if cuda_kernels("matmul_bfloat16", target, *types, **e.params) else ()


def _needs_copy_only(program: Program, v: Variable, products: Collection[Equation]) -> bool:
    """Whether all readers of ``v`` can read the copy."""
    readers = program.readers[v]
    return all(e in products or _compares_with_zero(e, program.constants) or sums_columns(e) for e in readers)


def _compares_with_zero(e: Equation, constants: Mapping[Variable, Array]) -> bool:
    zeros = {v for v, x in constants.items() if v.size == 1 and x.item() == 0}
    return e.primitive.name == "less" and not zeros.isdisjoint(e.inputs)


LAUNCH_CYCLES = 3800
"""Cycles of a launch."""


@keeps(Results.ROUNDING)
def choose_precision(program: Program, target: Target) -> Program:
    """``program`` with full precision where a rounded one is not faster by LAUNCH_CYCLES, or would prevent a chain."""
    of_copies = products_of_copies(program, target)

    def chosen(e: Equation) -> Equation:
        if e.params.get("precision", FULL) == FULL or e.inputs[0].type.dtype == BITS or e.name in OF_TERMS:
            return e
        full = replace(e, params={**e.params, "precision": FULL})
        if may_join(full, target) or is_narrow(full, target):
            return full
        if e in of_copies:
            return e
        rounded_cycles, full_cycles = _cycles(e, target), _cycles(full, target)
        if rounded_cycles is None or full_cycles is None:
            return e
        return full if full_cycles < rounded_cycles + LAUNCH_CYCLES else e

    return replace(program, equations=tuple(map(chosen, program.equations)))


def _cycles(e: Equation, target: Target) -> float | None:
    """The estimated cycles of the preferred kernel; None without an estimate."""
    kernels = cuda_kernels(e.primitive.name, target, *(v.type for v in e.inputs), **e.params)
    return kernels[0].cycles if kernels else None
