"""Horizontal fusion: independent equations share a kernel launch, each with thread blocks of its own.

Two kinds of equations are grouped: those whose results no other equation reads (weight gradients with their updates),
and those at the same level, the number of launches between the Program's inputs and the equation. An equation of one
thread block, such as the schedule, moves to the level with the most work among those that its readers allow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import numpy as np

from adtrain.backends.cuda.forms.column_sum_fusion import column_blocks
from adtrain.backends.cuda.forms.one_block_fusion import is_small
from adtrain.core.fused import COLUMN_SUM, HORIZONTAL, ONE_BLOCK, PRODUCT
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.target import Target
from adtrain.passes.fuse_elementwise import is_loops
from adtrain.passes.fusion import Fusion
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
        needed = {v for e in program.equations for v in e.inputs}
        # In order, the equations whose results no other one reads.
        self.last = [i for i, e in enumerate(program.equations) if needed.isdisjoint(e.outputs)]
        self.long = {e: tiles for i in self.last if (tiles := _long_tiles(e := program.equations[i]))}
        """The products longer than MAX_K that may share a launch, and their blocks."""
        if sum(self.long.values()) < self.target.multiprocessors:
            self.long = {}

    def together(self, groups: Groups) -> Iterable[Iterable[int]]:
        last = set(self.last)
        by_level: dict[int, list[int]] = {}
        for i, level in enumerate(_levels(self.program, self.max_blocks)):
            if i not in last:
                by_level.setdefault(level, []).append(i)
        for positions in (self.last, *by_level.values()):
            yield from self._launches(positions)

    def _launches(self, positions: Iterable[int]) -> Iterator[Sequence[int]]:
        """The equations in order, divided into launches of at most `max_blocks` blocks."""
        launch: list[int] = []
        blocks = 0
        pointers: set[Variable] = set()
        dtypes: set[np.dtype] = set()  # of products; a kernel supports one
        for i in positions:
            e = self.program.equations[i]
            own = self._blocks(e)
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

    def _blocks(self, equation: Equation) -> int | None:
        return self.long.get(equation) or blocks_in_launch(equation)


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
    """Whether it is a matrix product, with or without elementwise equations after it."""
    return equation.form == PRODUCT or equation.has(Trait.MATMUL)


def product_lengths(equation: Equation) -> tuple[int, int, int, int]:
    """The number of matrices, M, N and K of a product."""
    matmul = equation.params["body"].equations[0] if equation.form == PRODUCT else equation
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
        small = k <= MAX_K and 2 * batch * m * n * k <= MAX_FLOPS
        return batch * -(-m // TILE) * -(-n // TILE) if small else None
    if e.form == COLUMN_SUM:
        return column_blocks(e)
    return 1 if e.form == ONE_BLOCK or is_small(e) else None
