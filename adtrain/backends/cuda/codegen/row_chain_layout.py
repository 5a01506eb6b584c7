"""How the blocks of a row chain divide the work: rows of a tile, warps and places in memory. The time is estimated."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from itertools import product as cartesian
from typing import NamedTuple

from adtrain.backends.cuda.codegen.part import DRIVER_SHARED
from adtrain.backends.cuda.codegen.row_chain_plan import (
    Place,
    Plan,
    RowSum,
    arrange,
    padded,
    pitch,
    weight_pitch,
    width,
)
from adtrain.core.kernel import WARP, Target
from adtrain.core.program import Variable

WARPS = (4, 8, 12, 16)
"""Warps of a block."""
ROWS = (16, 32, 48, 64, 80, 96, 112, 128)
"""Rows of a tile. A tensor-core instruction takes 16 rows."""
STRIP = 16
"""Rows of a warp's tile."""
MAX_WARPS = 16
"""Maximum warps of a multiprocessor. A thread then has 128 registers."""
REGISTERS, MAX_REGISTERS = 1 << 16, 255
"""Registers of a multiprocessor, and the most of a thread."""
OTHER_REGISTERS = 80
"""Registers of a thread for all but its products."""
MARGIN = 16
"""Floats after the values of a tile, which a product of fewer than 16 columns reads."""


class Way(NamedTuple):
    """How factors of products are stored in shared memory and multiplied.

    Attributes:
        registers: of a thread for the accumulators of 16 x 8 elements of a result.
        depth: elements along K that an instruction of tensor cores multiplies.
        product: estimated instructions of a warp for a product of 16 x `depth` by `depth` x 8 elements.
        latency: estimated cycles of an instruction where a warp waits for its own results.
    """

    registers: int
    depth: int
    product: int
    latency: float


FLOATS = Way(4, 8, 7, 6.6)
"""As floats. Each warp splits what it reads into terms in tf32; see `kernels/cuda/gemm/row_chain.cuh`."""
TERMS = Way(12, 16, 20, 3.0)
"""As three terms in bfloat16, each number split once, in 6 bytes; see `kernels/cuda/gemm/row_chain_terms.cuh`."""
WAYS = (FLOATS, TERMS)


class Shared(NamedTuple):
    """Where the arguments that all rows share begin in shared memory, in floats.

    Attributes:
        weights: as floats.
        split_weights: weights as terms.
        vectors: other arguments.
        floats: of all.
    """

    weights: dict[Variable, int]
    split_weights: dict[Variable, int]
    vectors: dict[Variable, int]
    floats: int


@dataclass(frozen=True)
class Layout:
    """How a block divides the work.

    Attributes:
        way: how factors of products are stored and multiplied.
        rows: of a tile.
        warps: of a block.
        resident: the blocks of a multiprocessor.
        blocks: of the grid.
        shared: the arguments that all rows share. The values of a tile follow in shared memory.
        values: floats of the values of a tile in shared memory.
        kept: floats of the values of a tile in scratch memory.
    """

    plan: Plan
    way: Way
    rows: int
    warps: int
    resident: int
    blocks: int
    shared: Shared
    values: int
    kept: int

    @cached_property
    def offsets(self) -> dict[RowSum, int]:
        """Where each sum begins in the partial sums of a block."""
        found, at = {}, 0
        for total in self.plan.sums:
            found[total] = at
            at += self._floats(total)
        return found

    @cached_property
    def partial(self) -> int:
        """The floats of the partial sums of a block."""
        return sum(map(self._floats, self.plan.sums))

    def _floats(self, total: RowSum) -> int:
        """The floats of a partial sum with its copies. The next one begins at a multiple of 16 bytes."""
        return -(-total.size * self.copies(total) // 4) * 4

    def in_terms(self, v: Variable) -> bool:
        """Whether a value by row is stored as terms."""
        return self.way is TERMS and v in self.plan.factors

    def by_ones(self, total: RowSum) -> bool:
        """Whether tensor cores multiply ones by the rows of a sum of columns, which are terms."""
        _, x, _ = total.addends[0]
        return total.of_columns and self.in_terms(x)

    def copies(self, total: RowSum) -> int:
        """How many groups of warps divide the products that are added in a step, each for a partial sum of its own."""
        pairs, *others = {sum(at == step for at, *_ in total.addends) for step, *_ in total.addends}
        if total.of_columns or others:
            return 1
        strips, _, groups = self.divided(total)
        return max(n for n in range(1, pairs + 1) if pairs % n == 0 and (n == 1 or n * strips * groups <= self.warps))

    @property
    def floats(self) -> int:
        """The floats of shared memory."""
        return self.shared.floats + self.values

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @cached_property
    def most(self) -> int:
        """The most tiles of 8 columns of a warp; 0 if a thread has too few registers for its products."""
        products = max(map(len, self.plan.products.values()), default=1)
        registers = min(MAX_REGISTERS, REGISTERS // (self.threads * self.resident))
        return (registers - OTHER_REGISTERS) // (self.way.registers * products)

    def division(self, columns: int, strips: int = 0) -> tuple[int, int]:
        """How warps divide the columns of strips of 16 rows: the tiles of 8 columns that a warp takes at a time, a
        divisor of their number, and how many such groups a strip has.

        Args:
            strips: the number of strips; by default all strips of a tile.
        """
        tiles, strips = padded(columns) // 8, strips or self.rows // STRIP
        found = [n for n in range(1, self.most + 1) if tiles % n == 0]
        best = min(found, key=lambda n: (-(-(tiles // n * strips) // self.warps) * n, -n))
        return best, tiles // best

    def divided(self, total: RowSum) -> tuple[int, int, int]:
        """The strips of 16 rows of a sum of products, and the division of their columns."""
        rows, columns = total.shape
        strips = -(-rows // STRIP)
        return strips, *self.division(columns, strips)

    @cached_property
    def cycles(self) -> float:
        """An estimate of the time of all tiles."""
        tiles = -(-self.plan.count // self.rows)
        return -(-tiles // self.blocks) * sum(STEP + max(times) for times in self._times)

    @cached_property
    def alone(self) -> float:
        """The cycles of a tile if the warp with the most work of each step ran alone."""
        return sum(alone for alone, _ in self._times)

    @cached_property
    def _times(self) -> list[tuple[float, float]]:
        """The times of each step."""
        return [self._time(step) for step in range(self.plan.steps + 1)]

    def _time(self, step: int) -> tuple[float, float]:
        """The estimated cycles of a step for a warp, and for all warps of a multiprocessor; the longer time counts."""
        _, depth, product, latency = self.way
        tasks = list[tuple[int, int]]()  # tiles of warps, and the instructions of one
        targets = self.plan.targets[step] if step < self.plan.steps else {}
        for columns in dict.fromkeys(map(width, targets)):
            tiles, groups = self.division(columns)
            products = [e for e in self.plan.products.get(step, ()) if width(e.outputs[0]) == columns]
            k = max((-(-width(e.inputs[0]) // depth) for e in products), default=0)
            own = k * (len(products) * (FACTOR + product * tiles) + FACTOR * tiles) + ELEMENTS * tiles * len(targets)
            tasks.append((self.rows // STRIP * groups, own))
        for total in self.plan.sums:
            pairs = sum(at == step and y is not None for at, _, y in total.addends)
            if pairs:
                strips, tiles, groups = self.divided(total)
                copies = self.copies(total)
                own = pairs // copies * self.rows // depth * (2 * FACTOR + (FACTOR + product) * tiles)
                tasks.append((strips * groups * copies, own))
        alone = latency * sum(-(-items // self.warps) * own for items, own in tasks)
        return alone, self.resident * sum(items * own for items, own in tasks) * TOGETHER


FACTOR, ELEMENTS = 14, 60
"""Instructions of a warp: to load a factor, and split it if it is floats; for the elementwise equations of a target on
16 x 8 elements."""
STEP, TOGETHER = 1300, 0.4
"""Cycles: of a step in addition; of an instruction where the warps of a multiprocessor have more than its schedulers
can begin. They fit the times of two networks on an H200, within a tenth: 8 x 20 units on 10,000 rows, and 4 x 64 units
on 65,536."""


def layout_of(plan: Plan, target: Target) -> Layout | None:
    """The layout with the shortest estimated time, whose places are given to the plan; None if none fits on chip."""
    places = [x for own in plan.places.values() for x in own]
    found: list[Layout] = []
    for way, rows in cartesian(WAYS, ROWS):
        shared = _arrange_shared(plan, way)
        kept = arrange(plan.kept.values(), {x: rows * padded(width(x.value)) for x in plan.kept.values()})
        values = arrange(places, _sizes(plan, places, way, rows)) + MARGIN
        fit = (target.shared + DRIVER_SHARED) // (4 * (shared.floats + values) + DRIVER_SHARED)
        for warps in WARPS:
            for resident in range(1, min(fit, MAX_WARPS // warps) + 1):
                blocks = min(-(-plan.count // rows), resident * target.multiprocessors)
                found.append(Layout(plan, way, rows, warps, resident, blocks, shared, values, kept))
    found = [layout for layout in found if layout.most > 0]
    if not found:
        return None
    best = min(found, key=lambda layout: (layout.cycles, layout.alone))
    arrange(places, _sizes(plan, places, best.way, best.rows))
    arrange(plan.kept.values(), {x: best.rows * padded(width(x.value)) for x in plan.kept.values()})
    return best


def _arrange_shared(plan: Plan, way: Way) -> Shared:
    """The places of the arguments that all rows share."""
    weights, split_weights, vectors, at = dict[Variable, int](), dict[Variable, int](), dict[Variable, int](), 0
    for v in plan.weights:
        k, n = v.type.shape
        if way is FLOATS or v in plan.inline_weights:
            weights[v] = at
            at += padded(k) * weight_pitch(n)
        if way is TERMS and v in plan.tensor_weights:
            split_weights[v] = at
            at += term_floats(padded(k) * padded(n))
    for v in plan.vectors:
        vectors[v] = at
        at += -(-v.size // 4) * 4
    return Shared(weights, split_weights, vectors, at)


def _sizes(plan: Plan, places: Collection[Place], way: Way, rows: int) -> dict[Place, int]:
    """The floats of each place in shared memory."""

    def of_row(v: Variable) -> int:
        return term_floats(padded(width(v))) if way is TERMS and v in plan.factors else pitch(width(v))

    return {x: rows * of_row(x.value) for x in places}


def term_floats(n: int) -> int:
    """The floats in whose memory `n` numbers fit as three bfloat16 terms."""
    return 3 * n // 2
