"""Horizontal fusion: independent equations in one kernel, each with thread blocks of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import gcd, prod
from typing import TYPE_CHECKING, TypeAlias

from adtrain.backends.cuda.codegen.loops import loops
from adtrain.backends.cuda.codegen.part import Kernel, Part, groups_of, kernel
from adtrain.backends.cuda.codegen.product import epilogue, matmul_of
from adtrain.backends.cuda.forms.column_sum import column_sum
from adtrain.backends.cuda.forms.form import Form, define
from adtrain.backends.cuda.forms.horizontal_fusion import is_product, product_lengths
from adtrain.backends.cuda.forms.one_block import SHARED, one_block
from adtrain.codegen.expressions import c_type
from adtrain.core.fused import COLUMN_SUM, HORIZONTAL
from adtrain.core.program import Equation
from adtrain.core.target import Target
from adtrain.lowering.cuda.gemm.matmul import BlockGemm
from adtrain.passes.fuse_elementwise import is_loops

if TYPE_CHECKING:
    from adtrain.backends.cuda.lower import Lowering

THREADS = 256
"""Threads of a block without products. With products their tile sets the number."""

UNCROWDED, RESIDENT, RESIDENT_MEMBERS, RESIDENT_LONG = 2, 3, 4, 2
"""In a kernel of small GEMMs with more than UNCROWDED blocks per multiprocessor, registers are limited so that RESIDENT
blocks are resident on one, though some may spill; RESIDENT_MEMBERS in a Program by member, RESIDENT_LONG where a K is
longer than LONG_K."""
LONG_K = 128
"""The longest K for which RESIDENT blocks are faster, measured: `mlp` at batch 1024 has 256."""

Choice: TypeAlias = "Callable[[Equation], Sequence[BlockGemm]]"
"""The GEMM functions for a matrix product without split-K, the best first."""


def horizontal(members: Sequence[Equation], choose: Choice, target: Target) -> Kernel:
    """One kernel for independent members. The blocks of the members that take longest come first."""
    products = _same_threads({e: choose(e) for e in members if is_product(e)})
    threads = max((product.threads for product in products.values()), default=THREADS)
    parts = parts_of(members, products, threads, target)
    element = c_type(next(iter(products)).inputs[0].type.dtype) if products else ""
    crowded = target.by_member or sum(part.blocks for part in parts) > UNCROWDED * target.multiprocessors
    resident = 1
    if crowded and products and all(product.small for product in products.values()):
        resident = RESIDENT_MEMBERS if target.by_member else RESIDENT
        if any(product.lengths[-1] > LONG_K for product in products.values()):
            resident = RESIDENT_LONG
    return kernel("horizontal", parts, threads, element, resident)


def parts_of(
    members: Sequence[Equation],
    products: Mapping[Equation, BlockGemm],
    threads: int,
    target: Target,
    name: str = "Epilogue",
    shared: int = SHARED,
) -> list[Part]:
    """The parts of independent equations.

    Args:
        members: the equations.
        products: the function for each member that is a matrix product.
        threads: of a block.
        name: the names of the epilogues begin with it.
        shared: maximum bytes of shared memory of a `one_block` equation.
    """
    longest_first = sorted(products, key=lambda e: product_lengths(e)[-1], reverse=True)
    parts = [
        *(
            one_block(e, threads, shared)
            for e in members
            if e not in products and not is_loops(e) and e.form != COLUMN_SUM
        ),
        *_products({e: products[e] for e in longest_first}, threads, target, name),
        *(column_sum(e, threads) for e in members if e.form == COLUMN_SUM),
        *(loops(e).part(threads, target) for e in members if is_loops(e)),
    ]
    return [part for group in groups_of(parts) for part in group]


def _same_threads(choices: Mapping[Equation, Sequence[BlockGemm]]) -> dict[Equation, BlockGemm]:
    """A GEMM function for each product: the best one with as many threads as the largest product uses."""
    if not choices:
        return {}
    largest = max(choices, key=lambda e: prod(choices[e][0].lengths))
    common = set.intersection(*({p.threads for p in found} for found in choices.values()))
    threads = next((p.threads for p in choices[largest] if p.threads in common), 0)
    return {e: next((p for p in found if p.threads == threads), found[0]) for e, found in choices.items()}


def _products(chosen: Mapping[Equation, BlockGemm], threads: int, target: Target, prefix: str) -> Iterator[Part]:
    """The parts of products. Equal epilogues have one name, so that equal products have equal code."""
    named: dict[str, str] = {}
    for e, gemm in chosen.items():
        name = named.setdefault(epilogue(e, "").text, f"{prefix}{len(named)}")
        yield _product(e, gemm, name, threads, target)


def _product(equation: Equation, product: BlockGemm, name: str, threads: int, target: Target) -> Part:
    a, b = matmul_of(equation).inputs
    after = epilogue(equation, name)
    pointers = [f"x{i + 2}" for i in range(len(after.inputs))] + [f"y{i}" for i in range(len(after.outputs))]
    _, m, n, k = product.lengths
    # Of a small product only K must be a constant.
    lengths, end = (
        f"n0, n1, {k}" if product.small else f"{m}, {n}, {k}",
        f"const {name} end = {{{', '.join(pointers)}}};",
    )
    rows, columns = product.tile.m, product.tile.n
    shared = product.shared + staging_bytes(rows, columns, product.itemsize)
    fits = product.threads == threads and shared <= target.shared
    if product.small or not after.inputs or not fits:
        shared = product.shared
        lines = [
            end,
            f"if (threadIdx.x < {product.threads})",
            f"    {product.call}(x0, x1, end, {lengths}, 1, block, 0);",
        ]
    else:  # the tile goes through shared memory, so that all threads read the epilogue's inputs in vectors
        wide = gcd(16 // product.itemsize, n)
        lines = [
            end,
            f"const StagedTile<{rows}, {columns}> tile = {{(T *)(shared_bytes + {product.shared})}};",
            f"{product.call}(x0, x1, tile, {lengths}, 1, block, 0);",
            f"tile.finish<{wide}, THREADS>(end, {m}, {n}, block);",
        ]
    return Part(
        lines,
        (a, b, *after.inputs),
        after.outputs,
        ("common/common.cuh", product.header, "gemm/staged_epilogue.cuh"),
        definitions=after.text,
        blocks=product.blocks[0],
        shared=shared,
        lengths=(m, n) if product.small else (),
    )


def staging_bytes(rows: int, columns: int, itemsize: int) -> int:
    """Bytes of a `StagedTile` (`kernels/cuda/gemm/staged_epilogue.cuh`)."""
    return rows * (columns * itemsize + 16)


def _kernels(equation: Equation, lowering: Lowering) -> list[Kernel]:
    return [horizontal(equation.params["body"].equations, lowering.inline_products, lowering.target)]


define(Form(HORIZONTAL, _kernels))
