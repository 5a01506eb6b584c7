"""Horizontal fusion: equations that do not depend on one another share a launch, each with thread blocks of its own.

Two kinds: those whose results no other equation needs (updates of parameters, with the gradients of weights), which
wait for one another; and those between the same others, counted in launches from the Program's inputs. A thread block
of its own that has time, such as the schedule's until the first update, runs beside the most work that it can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from math import prod

from adtrain.core.fused import block_p, fuse, product_p, together_p
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.target import Target
from adtrain.passes.fuse_blocks import is_small
from adtrain.passes.fuse_elementwise import is_loops
from adtrain.passes.groups import Groups

WAVES = 3
"""Blocks for each multiprocessor that members have together, at most: with more, what a launch costs is no longer much
of what they take, and arguments would wait for long, keeping their memory."""

TILE = 64
"""Rows and columns of a product that a block computes."""
ELEMENTS = 4096
"""Elements of a result that a block computes elsewhere: 256 threads, 4 vectors each."""
LONGEST = 1024
"""Length of a product's sums. Longer ones may have to be cut among blocks, which takes a second launch."""
LARGEST = 1 << 29
"""Operations of a product, which with more of them fills the device by itself, and has ways of its own."""
POINTERS = 480
"""Arguments of a kernel, at most: 4 KiB hold 512 of them."""


def side_by_side(program: Program, target: Target) -> Program:
    """One `together` equation for each group of independent equations."""
    most = WAVES * target.multiprocessors
    groups = Groups(program)
    needed = {v for e in program.equations for v in e.inputs}
    last = [i for i, e in enumerate(program.equations) if needed.isdisjoint(e.outputs)]
    _merge(groups, last, most)
    by_level: dict[int, list[int]] = {}
    for i, level in enumerate(_levels(program, most)):
        if i not in last:
            by_level.setdefault(level, []).append(i)
    for members in by_level.values():
        _merge(groups, members, most)
    return groups.rewritten(partial(fuse, together_p))


def _merge(groups: Groups, independent: Iterable[int], most: int) -> None:
    """Merge equations that do not depend on one another, in their order, as far as they fit."""
    first: int | None = None
    blocks = 0
    pointers: set[Variable] = set()
    kinds: set[str] = set()  # element types of products, of which a kernel has one
    for i in independent:
        e = groups.equations[i]
        own = _blocks(e)
        if own is None:
            continue
        kind = {v.type.dtype.name for v in e.inputs[:1] if _is_product(e)}
        mine = {*e.inputs, *e.outputs}
        few = blocks + own <= most and len(pointers | mine) <= POINTERS
        if first is not None and few and len(kinds | kind) <= 1 and groups.can_merge(groups.of[first], i):
            groups.merge(groups.of[first], i)
            blocks, pointers, kinds = blocks + own, pointers | mine, kinds | kind
        else:
            first, blocks, pointers, kinds = i, own, mine, kind


def _levels(program: Program, most: int) -> list[int]:
    """For each equation the number of launches in front of it: on the longest way to it, or, for what takes one thread
    block, as many more as those which need it allow, where most work is done. What nobody needs comes last."""
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
        if (_blocks(e) or most) < most:
            work[level] += e.primitive.cost([v.type for v in e.inputs], e.params).flops
    needed: dict[Variable, int] = {}  # the level of the first who needs it
    for i in range(len(equations) - 1, -1, -1):
        e = equations[i]
        by = min((needed[v] for v in e.outputs if v in needed), default=end) - _launches(e)
        if not _launches(e):
            levels[i] = by
        elif _blocks(e) == 1 and by > levels[i]:
            levels[i] = max(range(levels[i], by + 1), key=lambda level: work[level])
        for v in e.inputs:
            needed[v] = min(needed.get(v, levels[i]), levels[i])
    return levels


def _launches(equation: Equation) -> int:
    return int(equation.primitive.name != "reshape")


def _is_product(equation: Equation) -> bool:
    return equation.primitive is product_p or equation.primitive.name == "matmul"


def _blocks(equation: Equation) -> int | None:
    """How many thread blocks it takes beside others, or None if it runs alone."""
    e = equation
    if not all(v.size for v in (*e.inputs, *e.outputs)):
        return None
    if is_loops(e):
        return -(-e.outputs[0].size // ELEMENTS)
    if _is_product(e):
        matmul = e.params["body"].equations[0] if e.primitive is product_p else e
        (*batch, m, n), a = matmul.outputs[0].type.shape, matmul.inputs[0].type.shape
        k = a[-2 if matmul.params["transpose_a"] else -1]
        few = k <= LONGEST and 2 * prod(batch) * m * n * k <= LARGEST
        return prod(batch) * -(-m // TILE) * -(-n // TILE) if few else None
    return 1 if e.primitive is block_p or is_small(e) else None
