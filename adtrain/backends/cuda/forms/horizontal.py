"""Horizontal fusion: independent equations share a kernel launch, each with thread blocks of its own.

Two kinds of equations are grouped. No other equation reads the results of the first kind, such as weight gradients with
their updates. Those of the second kind have the same level: the number of launches between the Program's inputs and the
equation. An equation of one thread block, such as the schedule, can run at any level before its readers. It moves to
the one with the most work.

In a Program of several ranks, small equations that have a launch of their own join a horizontal launch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import gcd, prod

import numpy as np

from adtrain.backends.cuda.codegen.loops import epilogue, loops, matmul_of
from adtrain.backends.cuda.codegen.part import Kernel, Part, groups_of, kernel
from adtrain.backends.cuda.forms import Form, define, no_kernel
from adtrain.backends.cuda.forms.column_sum import COLUMN_SUM, column_blocks, column_sum, shares_launch
from adtrain.backends.cuda.forms.one_block import ONE_BLOCK, is_small, one_block
from adtrain.codegen.elementwise import c_type
from adtrain.core.kernel import Target
from adtrain.core.primitive import Trait
from adtrain.core.program import HORIZONTAL, PRODUCT, Equation, Program, Variable, fuse
from adtrain.lowering.cuda.gemm import BlockGemm, block_gemms, has_short_k, member_gemms
from adtrain.lowering.cuda.indexing import Tiles, transposed_tiles
from adtrain.passes.fusion import Fusion, is_loops
from adtrain.passes.groups import Groups

WAVES = 3
"""Maximum blocks of a launch for each multiprocessor. With more, the saved launch matters little, and the arguments
stay in memory longer."""

TILE = 64
"""Rows and columns of a product that a block computes, as an estimate."""
ELEMENTS = 4096
"""Elements of another result that a block computes: 256 threads, 4 vectors each."""
MAX_K = 1024
"""Maximum length K of a product. A longer one may need split-K, which takes a second launch."""
LONG_TILE = 32
"""Rows and columns of a tile of a longer product. Longer products share a launch if their tiles together give each
multiprocessor one, so that K need not be split."""
MAX_FLOPS = 1 << 29
"""Maximum FLOPs of a product. A larger one fills the device by itself, and other kernels are faster for it."""
MAX_POINTERS = 480
"""Maximum pointers of a launch; a kernel's 4 KiB of arguments hold 512."""


class HorizontalFusion(Fusion):
    """Independent equations, each with thread blocks of its own."""

    form = HORIZONTAL

    def __init__(self, program: Program, target: Target | None = None) -> None:
        super().__init__(program, target)
        self.max_blocks = WAVES * self.target.multiprocessors
        self.long = {e: tiles for i in self.unread if (tiles := _long_tiles(e := program.equations[i]))}
        """The products longer than MAX_K that may share a launch, and their blocks."""
        if sum(self.long.values()) < self.target.multiprocessors:
            self.long = {}

    def together(self, groups: Groups) -> Iterable[Iterable[int]]:
        last = set(self.unread)
        by_level: dict[int, list[int]] = {}
        for i, level in enumerate(_levels(self.program, self.max_blocks)):
            if i not in last:
                by_level.setdefault(level, []).append(i)
        for positions in (self.unread, *by_level.values()):
            yield from self._launches(positions)

    def _launches(self, positions: Iterable[int]) -> Iterator[Sequence[int]]:
        """The equations in order, divided into launches of at most `max_blocks` blocks."""
        launch: list[int] = []
        blocks = 0
        pointers: set[Variable] = set()
        dtypes: set[np.dtype] = set()  # of products; a kernel supports one
        for i in positions:
            e = self.program.equations[i]
            own = self.long.get(e) or blocks_in_launch(e)
            if own is None:
                continue
            dtype = {e.inputs[0].type.dtype} if is_product(e) else set()
            operands = {*e.inputs, *e.outputs}
            fits = blocks + own <= self.max_blocks and len(pointers | operands) <= MAX_POINTERS
            if launch and not (fits and len(dtypes | dtype) <= 1):
                yield launch
                launch, blocks, pointers, dtypes = [], 0, set(), set()
            launch.append(i)
            blocks, pointers, dtypes = blocks + own, pointers | operands, dtypes | dtype
        yield launch


def _levels(program: Program, max_blocks: int) -> list[int]:
    """The level of each equation: the number of launches on the longest path to it.

    An equation of one thread block moves to the level with the most work, if its readers allow. Equations that no
    other equation reads have the last level.
    """
    equations = program.equations
    after: dict[Variable, int] = {}
    levels = []
    for e in equations:
        levels.append(max((after.get(v, 0) for v in e.inputs), default=0))
        after |= dict.fromkeys(e.outputs, levels[-1] + _launches(e))
    read, end = {v for e in equations for v in e.inputs}, max(levels, default=0)
    levels = [end if read.isdisjoint(e.outputs) else level for e, level in zip(equations, levels, strict=True)]
    work: Counter[int] = Counter()
    for e, level in zip(equations, levels, strict=True):
        if (blocks_in_launch(e) or max_blocks) < max_blocks:
            work[level] += e.cost.flops
    first_read: dict[Variable, int] = {}  # the level of the first reader
    for i in range(len(equations) - 1, -1, -1):
        e = equations[i]
        by = min((first_read[v] for v in e.outputs if v in first_read), default=end) - _launches(e)
        if not _launches(e):
            levels[i] = by
        elif blocks_in_launch(e) == 1 and by > levels[i]:
            levels[i] = max(range(levels[i], by + 1), key=lambda level: work[level])
        for v in e.inputs:
            first_read[v] = min(first_read.get(v, levels[i]), levels[i])
    return levels


def _launches(equation: Equation) -> int:
    return int(not equation.has(Trait.RESHAPE))


def is_product(equation: Equation) -> bool:
    """Whether it is a product of two matrices that are not bfloat16 in memory, with or without elementwise equations
    after it."""
    product = equation.form == PRODUCT or equation.has(Trait.MATMUL)
    return product and matmul_of(equation).primitive.name == "matmul"


def product_lengths(equation: Equation) -> tuple[int, int, int, int]:
    """The number of matrices, M, N and K of a product."""
    matmul = matmul_of(equation)
    (*batch, m, n), a = matmul.outputs[0].type.shape, matmul.inputs[0].type.shape
    return prod(batch), m, n, a[-2 if matmul.params["transpose_a"] else -1]


def _long_tiles(equation: Equation) -> int:
    """The tiles of a product whose K is longer than MAX_K; 0 for any other equation."""
    if not is_product(equation) or not all(v.size for v in (*equation.inputs, *equation.outputs)):
        return 0
    batch, m, n, k = product_lengths(equation)
    if k <= MAX_K or 2 * batch * m * n * k > MAX_FLOPS:
        return 0
    return batch * -(-m // LONG_TILE) * -(-n // LONG_TILE)


def blocks_in_launch(equation: Equation) -> int | None:
    """The number of thread blocks in a shared launch; None if the equation needs a launch of its own."""
    e = equation
    if not all(v.size for v in (*e.inputs, *e.outputs)):
        return None
    if is_loops(e):
        return -(-e.outputs[0].size // ELEMENTS)
    if is_product(e):
        batch, m, n, k = product_lengths(e)
        small = k <= MAX_K and 2 * batch * m * n * k <= MAX_FLOPS and not has_short_k((batch, m, n, k))
        return batch * -(-m // TILE) * -(-n // TILE) if small else None
    if e.form == COLUMN_SUM:
        return column_blocks(e) if shares_launch(e) else None
    if e.form == ONE_BLOCK or is_small(e):
        return 1
    tiles = _tiles(e)
    return tiles.blocks if tiles else None


def _tiles(equation: Equation) -> Tiles | None:
    """The tiles of a transpose that is not small; None for other equations."""
    if equation.primitive.name != "transpose" or is_small(equation) or equation.form:
        return None
    return transposed_tiles(equation.inputs[0].type, equation.params["axes"])


def join_one_blocks(program: Program) -> Program:
    """Let each `one_block` equation, such as the sums of the metrics, join the first horizontal launch that it can.

    Its sums may have other bits then. Applied to each region, so the bits do not depend on the number of ranks.
    """
    return _joined(program, lambda e: e.form == ONE_BLOCK)


def join_loops(program: Program) -> Program:
    """Let loops of one block, such as the schedule, join the first horizontal launch that they can."""
    return _joined(program, lambda e: is_loops(e) and blocks_in_launch(e) == 1)


def _joined(program: Program, joins: Callable[[Equation], bool]) -> Program:
    groups = Groups(program)
    launches: list[int] = []
    for i, e in enumerate(program.equations):
        if e.form == HORIZONTAL:
            launches.append(i)
        elif joins(e):
            for x in launches:
                both = (*groups.group_of(x), *groups.group_of(i))
                pointers = {v for e in both for v in (*e.inputs, *e.outputs)}
                if len(pointers) <= MAX_POINTERS and groups.merge_independent(x, i):
                    break
    return groups.rewritten(_horizontal, anchor=min)


def _horizontal(equations: Sequence[Equation], needed: Sequence[Variable]) -> Equation:
    bodies = [e.params["body"].equations if e.form == HORIZONTAL else (e,) for e in equations]
    return fuse(HORIZONTAL, [member for body in bodies for member in body], needed)


THREADS = 256
"""Threads of a block without products. With products their tile sets the number."""

UNCROWDED, RESIDENT, RESIDENT_MEMBERS, RESIDENT_LONG = 2, 3, 4, 2
"""A kernel of small GEMMs with more than UNCROWDED blocks per multiprocessor has few registers a thread, so that
RESIDENT blocks fit on one. Some registers may spill. RESIDENT_MEMBERS is for a Program by member, RESIDENT_LONG for a K
longer than LONG_K."""
LONG_K = 128
"""The longest K for which RESIDENT blocks are faster, measured: `mlp` at batch 1024 has 256."""

MAX_SHORT_K = 256
"""Length K of a matrix product up to which its epilogue takes most of the time."""


def inline_products(equation: Equation, target: Target) -> list[BlockGemm]:
    """The device functions for a matrix product inside a kernel with other equations, without split-K.

    Where K is short the epilogue takes most of the time: functions whose threads share it evenly come first.
    Raises DeviceError: there is none.
    """
    matmul = matmul_of(equation)
    a, b = matmul.inputs
    found = (member_gemms if target.by_member else block_gemms)(target, a.type, b.type, **matmul.params)
    if not found:
        raise no_kernel(matmul)
    if target.by_member:
        return [*found]
    k = found[0].lengths[-1]
    if k > MAX_K:  # a tile reads much: the largest one that splits K among warps
        ordered = sorted(found, key=lambda gemm: (not gemm.small, -gemm.tile.m * gemm.tile.n))
    else:
        ordered = sorted(found, key=lambda gemm: (k <= MAX_SHORT_K and not gemm.small, gemm.splits > 1))
    return [replace(gemm, splits=1) for gemm in ordered]


def horizontal(members: Sequence[Equation], target: Target) -> Kernel:
    """One kernel for independent members. The blocks of the members that take longest come first."""
    products = _same_threads({e: inline_products(e, target) for e in members if is_product(e)})
    threads = max((product.threads for product in products.values()), default=THREADS)
    transposes = {e: tiles for e in members if (tiles := _tiles(e))}
    others = {*products, *transposes, *(e for e in members if is_loops(e) or e.form == COLUMN_SUM)}
    longest_first = sorted(products, key=lambda e: product_lengths(e)[-1], reverse=True)
    parts = [
        *(one_block(e, threads) for e in members if e not in others),
        *_products({e: products[e] for e in longest_first}, threads, target),
        *(column_sum(e, threads) for e in members if e.form == COLUMN_SUM),
        *(loops(e).part(threads, target) for e in members if is_loops(e)),
        *(_transpose(e, tiles) for e, tiles in transposes.items()),
    ]
    parts = [part for group in groups_of(parts) for part in group]
    element = c_type(next(iter(products)).inputs[0].type.dtype) if products else ""
    crowded = target.by_member or sum(part.blocks for part in parts) > UNCROWDED * target.multiprocessors
    resident = 1
    if crowded and products and all(product.small for product in products.values()):
        resident = RESIDENT_MEMBERS if target.by_member else RESIDENT
        if any(product.lengths[-1] > LONG_K for product in products.values()):
            resident = RESIDENT_LONG
    return kernel("horizontal", parts, threads, element, resident)


def _same_threads(choices: Mapping[Equation, Sequence[BlockGemm]]) -> dict[Equation, BlockGemm]:
    """A GEMM function for each product: the best one with as many threads as the largest product uses."""
    if not choices:
        return {}
    largest = max(choices, key=lambda e: prod(choices[e][0].lengths))
    common = set.intersection(*({p.threads for p in found} for found in choices.values()))
    threads = next((p.threads for p in choices[largest] if p.threads in common), 0)
    return {e: next((p for p in found if p.threads == threads), found[0]) for e, found in choices.items()}


def _products(chosen: Mapping[Equation, BlockGemm], threads: int, target: Target) -> Iterator[Part]:
    """The parts of products. Equal epilogues have one name, so that equal products have equal code."""
    named: dict[str, str] = {}
    for e, gemm in chosen.items():
        name = named.setdefault(epilogue(e, "").text, f"Epilogue{len(named)}")
        yield _product(e, gemm, name, threads, target)


def _product(equation: Equation, product: BlockGemm, name: str, threads: int, target: Target) -> Part:
    a, b = matmul_of(equation).inputs
    after = epilogue(equation, name)
    pointers = [f"x{i + 2}" for i in range(len(after.inputs))] + [f"y{i}" for i in range(len(after.outputs))]
    _, m, n, k = product.lengths
    # Of a small product only K must be a constant.
    lengths = f"n0, n1, {k}" if product.small else f"{m}, {n}, {k}"
    lines = [f"const {name} end = {{{', '.join(pointers)}}};"]
    rows, columns = product.tile.m, product.tile.n
    staged = rows * (columns * product.itemsize + 16)  # bytes of a `StagedTile` (gemm/gemm.cuh)
    shared = product.shared + staged
    if product.small or not after.inputs or product.threads != threads or shared > target.shared:
        shared = product.shared
        lines += [
            f"if (threadIdx.x < {product.threads})",
            f"    {product.call}(x0, x1, end, {lengths}, 1, block, 0);",
        ]
    else:  # the tile goes through shared memory, so that all threads read the epilogue's inputs in vectors
        wide = gcd(16 // product.itemsize, n)
        lines += [
            f"const StagedTile<{rows}, {columns}, {staged}> tile = {{(T *)(shared_bytes + {product.shared})}};",
            f"{product.call}(x0, x1, tile, {lengths}, 1, block, 0);",
            f"tile.finish<{wide}, THREADS>(end, {m}, {n}, block);",
        ]
    return Part(
        lines,
        (a, b, *after.inputs),
        after.outputs,
        ("common/common.cuh", product.header, "gemm/gemm.cuh"),
        definitions=after.text,
        blocks=product.blocks[0],
        shared=shared,
        lengths=(m, n) if product.small else (),
    )


def _transpose(equation: Equation, tiles: Tiles) -> Part:
    """The part for a transpose through tiles."""
    (x,) = equation.inputs
    lines = [
        f"constexpr int R = {tiles.rows}, C = {tiles.columns};",
        "const int across = (n2 + C - 1) / C, down = (n1 + R - 1) / R, outer = block / across / down; (void)n0;",
        "const int row = block / across % down * R, column = block % across * C;",
        f"((CopyTile<{c_type(x.type.dtype)}, R, C> *)shared_bytes)->copy<THREADS>(",
        "    x0 + outer * n3 + row * n4 + column * n5, y0 + outer * n6 + row * n7 + column * n8,",
        "    min(n1 - row, R), min(n2 - column, C), n4, n5, n7, n8);",
    ]
    return Part(
        lines,
        equation.inputs,
        equation.outputs,
        ("index/copy_tile.cuh",),
        "extern __shared__ __align__(16) unsigned char shared_bytes[];",
        blocks=tiles.blocks,
        shared=tiles.columns * (tiles.rows + 1) * x.type.dtype.itemsize,
        lengths=tuple(axis[k] for k in range(3) for axis in tiles.axes),
    )


define(Form(HORIZONTAL, lambda equation, target: [horizontal(equation.params["body"].equations, target)]))
