"""Grouped products: weight gradients with a long K in one launch, which divides their K evenly among all blocks.

Each alone has few tiles, so its K is split among many blocks, and a second launch adds many partial sums. Together
they have more tiles, so a tile has few partial sums. One launch adds the partial sums of all products and runs their
updates. A product with tiles for half of the multiprocessors fills the device by itself. Sums of columns share the
first launch. If a product loads the same matrix, as for a bias gradient, its blocks add the columns. Other sums have
their own blocks, which wait for memory while the others multiply.

A product of few columns, such as the weight gradient of a first layer, fills only a part of a tile. But alone it would
have two launches for little work.

Grouped products of bfloat16 are one launch. The gradient of one weight has few tiles, which leave multiprocessors
without work in the last wave. The tiles of several gradients fill more waves. The last wave is split along K, or filled
better.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from math import gcd

import numpy as np

from adtrain.backends.cuda.codegen.loops import GROUPED_BFLOAT16, Epilogue, epilogue, epilogue_bytes, matmul_of
from adtrain.backends.cuda.codegen.part import Kernel, Part, kernel
from adtrain.backends.cuda.forms import Form, define
from adtrain.backends.cuda.forms.column_sum import (
    COLUMN_SUM,
    TOTAL,
    after_totals,
    column_blocks,
    column_sum,
    shares_launch,
    summed_matrix,
)
from adtrain.backends.cuda.forms.horizontal import MAX_K, MAX_POINTERS, is_product, product_lengths
from adtrain.core.kernel import HOPPER, WARP, CudaKernel, Target, cuda_kernels
from adtrain.core.precision import FULL
from adtrain.core.program import PRODUCT, Equation, Program, Variable, body_of
from adtrain.lowering.cuda.gemm.bf16x3 import (
    BUFFERS,
    CHUNK_BYTES,
    CHUNK_ELEMENTS,
    PRODUCER_THREADS,
    STAGES,
    TERMS,
    TILE_K,
    Bf16x3Tile,
)
from adtrain.lowering.cuda.gemm.bf16x3 import THREADS as GEMM_THREADS
from adtrain.lowering.cuda.gemm.bfloat16 import TILES, Bfloat16Product, product_kernels
from adtrain.lowering.cuda.gemm.cost_model import BF16X3_EVEN_WIDTHS, bf16x3_stage_cycles
from adtrain.passes.fusion import Fusion, with_shared_views
from adtrain.passes.groups import Groups

GROUPED_PRODUCTS = "grouped_products"
"""Independent matrix products with epilogues in one launch whose blocks share the tiles and their K evenly."""

TILE = 128
"""Rows and columns of a tile, by which tiles are counted."""
MIN_LENGTH, MULTIPLE = 64, 4
"""Minimum rows and columns of a product; they are multiples of MULTIPLE. MIN_LENGTH is NARROW in `gemm_bf16x3.cuh`."""
MIN_NARROW = 32
"""Minimum columns of a narrow product, which has fewer than MIN_LENGTH. They need not be a multiple of MULTIPLE. With
fewer columns most of a tile would be empty."""
MIN_FLOPS = 1 << 32
"""Minimum FLOPs of a group. Products of fewer share a launch with other equations (`horizontal`)."""
MAX_ELEMENTS = 1 << 30
"""Maximum elements of a matrix. The offsets in `gemm_bf16x3.cuh` have 32 bits, and exceed the end by up to a tile."""
MAX_PRODUCTS = 40
"""Maximum products of a group: their pointers are arguments of the kernel."""


class GroupedProductsFusion(Fusion):
    """The long products whose results no other equation reads, and sums of columns beside them."""

    form = GROUPED_PRODUCTS

    @classmethod
    def runs_on(cls, target: Target) -> bool:
        return target.capability == HOPPER and not target.by_member

    def prepared(self) -> Program:
        if not self._product_groups():
            return self.program
        return with_shared_views(self.program, lambda e: bool(_tiles(e)) or e.form == COLUMN_SUM)

    def together(self, groups: Groups) -> Iterable[Iterable[int]]:
        sums = [i for i in self.unread if shares_launch(self.program.equations[i])]
        for products in self._product_groups():
            added = _as_many_as_fit(self.program, products, sums)
            sums = [i for i in sums if i not in added]
            yield (*products, *added)

    def overhead(self, equations: Sequence[Equation]) -> float:
        """Two launches. Products of MIN_FLOPS save as much time, because they compute faster than alone."""
        return 2 - 2 * sum(e.cost.flops for e in equations if _tiles(e)) / MIN_FLOPS

    def _product_groups(self) -> list[list[int]]:
        """The positions of the products of each group."""
        equations, most = self.program.equations, self.target.multiprocessors // 2
        found = [i for i in self.unread if 0 < _tiles(equations[i]) < most]
        groups = [found[first : first + MAX_PRODUCTS] for first in range(0, len(found), MAX_PRODUCTS)]
        return [g for g in groups if len(g) > 1 and sum(equations[i].cost.flops for i in g) >= MIN_FLOPS]


def _as_many_as_fit(program: Program, products: Sequence[int], sums: Sequence[int]) -> list[int]:
    """The first of the sums of columns, as many as the arguments of a kernel allow beside those of the products."""
    pointers = {v for i in products for v in _arguments(program.equations[i])}
    found = []
    for i in sums:
        more = pointers | _arguments(program.equations[i])
        if len(more) <= MAX_POINTERS:
            found.append(i)
            pointers = more
    return found


def _arguments(equation: Equation) -> set[Variable]:
    return {*equation.inputs, *equation.outputs}


def _tiles(equation: Equation) -> int:
    """The tiles of a product that can be in a group; 0 for any other equation."""
    if not is_product(equation):
        return 0
    matmul = matmul_of(equation)
    if matmul.inputs[0].type.dtype.name != "float32" or matmul.params["precision"] != FULL:
        return 0
    if not matmul.params["transpose_a"] or matmul.params["transpose_b"]:
        return 0
    batch, m, n, k = product_lengths(equation)
    right_columns = MIN_NARROW <= n < MIN_LENGTH or (n >= MIN_LENGTH and n % MULTIPLE == 0)
    suits = batch == 1 and m >= MIN_LENGTH and m % MULTIPLE == 0 and right_columns and k > MAX_K
    fits = suits and max(m, n) * k < MAX_ELEMENTS
    return -(-m // TILE) * -(-n // TILE) if fits else 0


THREADS, VECTOR = 256, 4
"""Threads of a block of the second launch; maximum of neighbouring elements that a thread computes."""
BYTES_PER_CYCLE = 30
"""Bytes that a multiprocessor reads in a cycle for sums of columns."""
ITEMSIZE = np.dtype(np.float32).itemsize


def grouped_products(equation: Equation, target: Target) -> list[Kernel]:
    """The two launches of a `grouped_products` equation."""
    members = equation.params["body"].equations
    sums = sorted((e for e in members if e.form == COLUMN_SUM), key=_elements_per_block, reverse=True)
    products = [e for e in members if e.form != COLUMN_SUM]
    # The first product that loads each matrix as its first factor; the product whose blocks add each sum.
    loaded = {matmul_of(e).inputs[0]: i for i, e in reversed([*enumerate(products)])}
    in_products = {e: loaded[x] for e in sums if (x := summed_matrix(e)) in loaded}
    sums = [e for e in sums if e not in in_products]
    lengths = [product_lengths(e)[1:] for e in products]
    tile = min(map(Bf16x3Tile, BF16X3_EVEN_WIDTHS), key=lambda t: sum(_stages(t, lengths)) * bf16x3_stage_cycles(t))
    stages, tiles = sum(_stages(tile, lengths)), [tile.tiles(1, m, n) for m, n, _ in lengths]
    multiply = stages * bf16x3_stage_cycles(tile)
    read = sum(ITEMSIZE * v.size for e in sums for v in e.inputs) / BYTES_PER_CYCLE
    blocks = min(max(1, round(target.multiprocessors * multiply / (multiply + read))), stages)
    shared = _shared(tile) + (PRODUCER_THREADS * CHUNK_ELEMENTS * ITEMSIZE if in_products else 0)
    macros = {
        "TILE_N": tile.n,
        **{"TRANSPOSE_A": 1, "TRANSPOSE_B": 0, "WIDE_A": 4, "WIDE_B": 4, "WIDE_C": 2, "SHARED_BYTES": shared},
        "GROUPED_ROW_SUMS": int(bool(in_products)),
        "GROUPED_BLOCKS": blocks,
        "GROUPED_SLOTS": sum(tiles) + blocks,
        "GROUPED_COUNT": len(products),
        "GROUPED_LENGTHS": ",".join(f"{{{m},{n},{k}}}" for m, n, k in lengths),
    }
    factors = ", ".join(f"{{x{2 * i}, x{2 * i + 1}}}" for i in range(len(products)))
    row_sums = PRODUCER_THREADS // WARP if in_products else 0
    scratch = macros["GROUPED_SLOTS"] * tile.m * (tile.n + row_sums) * ITEMSIZE
    first = Part(
        [f"const T *const factors[][2] = {{{factors}}};", "multiply_group(factors, own, block);"],
        [v for e in products for v in matmul_of(e).inputs],
        (),
        ("common/common.cuh", "gemm/grouped_bf16x3.cuh"),
        blocks=blocks,
        shared=shared,
        scratch=scratch,
        fills_registers=True,
    )
    names: dict[str, str] = {}
    parts = []
    for i, e in enumerate(products):
        name = names.setdefault(epilogue(e, "").text, f"Epilogue{len(names)}")
        parts.append(_sum(e, i, sum(tiles[:i]), name, scratch if i == 0 else 0))  # one scratch memory for all parts
    parts += [_row_sum(e, i, sum(tiles[:i])) for e, i in in_products.items()]
    multiplying = [first, *(column_sum(e, GEMM_THREADS) for e in sums)]
    return [
        kernel("grouped_products", multiplying, GEMM_THREADS, "float", macros=macros),
        kernel("grouped_sum", parts, THREADS, "float", macros=macros),
    ]


def _sum(equation: Equation, number: int, first_tile: int, name: str, scratch: int) -> Part:
    """The part that adds the partial sums of a product and passes them to its epilogue."""
    after = epilogue(equation, name)
    pointers = [f"x{i}" for i in range(len(after.inputs))] + [f"y{i}" for i in range(len(after.outputs))]
    _, m, n, _ = product_lengths(equation)
    wide = gcd(n, VECTOR)
    lines = [
        f"const {name} out = {{{', '.join(pointers)}}};",
        f"add_parts<{number}, {first_tile}, THREADS, {wide}>(scratch, out, block);",
    ]
    headers = ("common/common.cuh", "gemm/grouped_sum.cuh")
    blocks = -(-m * n // (THREADS * wide))
    return Part(lines, after.inputs, after.outputs, headers, after.text, blocks, scratch=scratch)


def _row_sum(equation: Equation, number: int, first_tile: int) -> Part:
    """The part that adds the partial sums of columns of a product's first factor, and computes outputs from them."""
    body = body_of(equation)
    columns = body.equations[0].outputs[0].size
    lines = [
        "const int column = block * THREADS + threadIdx.x;",
        f"if (column >= {columns}) return;",
        f"const {TOTAL} totals[] = {{row_sum<{number}, {first_tile}>(scratch, column)}};",
        *after_totals(equation),
    ]
    headers = ("common/common.cuh", "gemm/grouped_sum.cuh")
    return Part(lines, body.inputs, body.outputs, headers, blocks=-(-columns // THREADS))


def _elements_per_block(equation: Equation) -> float:
    """The elements that a block of a sum of columns reads. Blocks with the most start first: all end together."""
    return sum(v.size for v in equation.inputs) / column_blocks(equation)


def _stages(tile: Bf16x3Tile, lengths: Sequence[tuple[int, int, int]]) -> list[int]:
    """The stages of all tiles of each product, whose M, N and K are given."""
    return [tile.tiles(1, m, n) * -(-k // TILE_K) for m, n, k in lengths]


def _shared(tile: Bf16x3Tile) -> int:
    """Bytes of shared memory of the products: the pipeline, and buffers of float32."""
    copied = TILE_K * CHUNK_ELEMENTS * ITEMSIZE
    chunks = (tile.m + tile.n) // CHUNK_ELEMENTS
    return chunks * (STAGES * TERMS * (TILE_K + 1) * CHUNK_BYTES + BUFFERS * copied)


define(Form(GROUPED_PRODUCTS, grouped_products))


MAX_BFLOAT16_PRODUCTS = 8
"""Maximum products of a launch. Their operands stay in memory until the last one is ready."""
MAX_WAVES = 4
"""Maximum waves of tiles of a product. A larger product loses little in its last wave, and its operands would stay in
memory for the others."""
MAX_BFLOAT16_POINTERS = 256
"""Maximum arrays of a launch. Its arguments have 4 KiB, of which tensor maps take half."""


class GroupedBfloat16Fusion(Fusion):
    """Consecutive products of bfloat16 of one kind whose results no other equation reads."""

    form = GROUPED_BFLOAT16

    @classmethod
    def runs_on(cls, target: Target) -> bool:
        return target.capability == HOPPER and not target.by_member

    def together(self, groups: Groups) -> Iterable[Iterable[int]]:
        run: list[int] = []
        for i in self._products:
            if run and self._products[i] != self._products[run[0]]:
                yield from self._divided(run)
                run = []
            run.append(i)
        yield from self._divided(run)

    @cached_property
    def _products(self) -> dict[int, tuple[object, ...]]:
        """The positions of the products that can be in a group, and what the products of a group have in common.

        This is K, whether A and B are transposed, the text of the epilogue, and whether other equations convert an
        argument of it to bfloat16: a weight, whose copy the epilogue may write in repeated steps (`prefetch_batch`).
        """
        equations = self.program.equations
        converted = {e.inputs[0] for e in equations if e.primitive.name == "to_bfloat16"}
        found: dict[int, tuple[object, ...]] = {}
        for i in self.unread:
            e, product = equations[i], matmul_of(equations[i])
            if e.form != PRODUCT or product.name != "matmul_bfloat16" or len(product.outputs[0].type.shape) != 2:
                continue
            a, b = product.inputs
            transposed = bool(product.params["transpose_a"]), bool(product.params["transpose_b"])
            m, n = product.outputs[0].type.shape
            few = -(-m // TILE) * -(-n // TILE) <= MAX_WAVES * self.target.multiprocessors
            if few and a is not b and cuda_kernels(product.name, self.target, a.type, b.type, **product.kernel_params):
                is_converted = not converted.isdisjoint(e.inputs)
                found[i] = product_lengths(e)[-1], transposed, epilogue(e).text, is_converted
        return found

    def _divided(self, run: Sequence[int]) -> list[Sequence[int]]:
        """Consecutive groups of a run of products that take the fewest cycles by estimate."""
        best: list[tuple[float, list[Sequence[int]]]] = [(0.0, [])]
        known: dict[Sequence[tuple[int, ...]], float] = {}
        for end in range(1, len(run) + 1):
            found = []
            for first in range(max(0, end - MAX_BFLOAT16_PRODUCTS), end):
                members = [self.program.equations[i] for i in run[first:end]]
                pointers = {v for e in members for v in (*e.inputs, *e.outputs)}
                if len(pointers) > MAX_BFLOAT16_POINTERS and len(members) > 1:
                    continue
                key = tuple(matmul_of(e).outputs[0].type.shape for e in members)
                if key not in known:
                    cycles = product_kernels(_product(members, self.target))[0].cycles
                    assert cycles is not None
                    known[key] = cycles
                before, groups = best[first]
                found.append((before + known[key], [*groups, run[first:end]]))
            best.append(min(found, key=lambda x: x[0]))
        return best[-1][1]


def _product(equations: Sequence[Equation], target: Target) -> Bfloat16Product:
    """The work of several products."""
    first, params = equations[0], matmul_of(equations[0]).params
    others = tuple(product_lengths(e)[1:3] for e in equations[1:])
    mn_major = bool(params["transpose_a"]), not params["transpose_b"]
    own = epilogue_bytes(first)
    return Bfloat16Product(target, product_lengths(first), TILES[0], mn_major, others=others, epilogue=own)


def _candidates(equation: Equation, target: Target) -> Sequence[CudaKernel]:
    return product_kernels(_product(body_of(equation).equations, target))


def _epilogues(equation: Equation) -> Epilogue:
    """The epilogues of all products, an array of structs: the pointers of the first one, then of the next one."""
    members = body_of(equation).equations
    own = [epilogue(e) for e in members]
    assert len({x.text for x in own}) == 1, "products of a group"
    text = f"{own[0].text}\nstruct Epilogues {{\n    Epilogue of[{len(own)}];\n}};"
    return Epilogue(text, [v for x in own for v in (*x.inputs, *x.outputs)], ())


define(Form(GROUPED_BFLOAT16, candidates=_candidates, epilogue=_epilogues))
