"""Items of threads: equations of many small items, each computed by one thread that holds its elements in registers.

Examples: layers of a narrow network for many points, and products of small matrices. Item n of each of these equations
needs item n of the others, and arrays that all items share. An item is an index of axis 0, or some neighbouring ones: a
matrix of four rows is an item of a product of all their rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from adtrain.backends.cuda.codegen.part import Kernel, kernel
from adtrain.backends.cuda.codegen.thread_items import STAGE_BYTES, THREADS, has_rule, operations, thread_items
from adtrain.backends.cuda.forms.form import Form, define
from adtrain.core.axes import Items
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.target import Target
from adtrain.passes.fuse_elementwise import by_element
from adtrain.passes.fusion import Fusion
from adtrain.passes.groups import MAX_EQUATIONS, Groups

if TYPE_CHECKING:
    from adtrain.backends.cuda.lower import Lowering

THREAD_ITEMS = "thread_items"
"""Equations that work item by item. Each thread of a GPU computes all of them for its item."""

MIN_ITEMS = 1 << 15
"""Minimum items: threads that keep the largest GPU busy."""
MAX_ELEMENTS = 64
"""Maximum elements of an item that is read or written."""
MAX_INSIDE = 512
"""Maximum elements of an item between two equations."""
MAX_SHARED_BYTES = 24 << 10
"""Maximum bytes of the arrays that all items share. Each block copies them to shared memory."""
MAX_OPERATIONS, MAX_OPERATIONS_WITH_LARGE = 2 << 10, 4 << 10
"""Maximum statements of a thread, in general and with a value inside that is too large to be stored.

The instructions of longer kernels do not fit in the instruction cache: the second derivatives of a network of 8 x 20
units take 1.17 times as long with 4,096.
"""
MAX_LIVE = 96
"""Maximum elements between equations that a thread holds at once. It has 255 registers."""

RESIDENT = 3
"""Blocks for which a multiprocessor must have registers."""


class ThreadItemsFusion(Fusion):
    """Connected equations that work item by item, with few elements for each item.

    What one reduction over items reads is left to the kernel of the reduction, if that reads one array for it.
    """

    form = THREAD_ITEMS
    limit = MAX_EQUATIONS
    in_order = True

    @classmethod
    def runs_on(cls, target: Target) -> bool:
        return not target.by_member and target.shared >= STAGE_BYTES + MAX_SHARED_BYTES

    @cached_property
    def found(self) -> list[Items | None]:
        """How each equation works item by item; None for one that has no part in such a kernel."""
        return [items_of_threads(e) for e in self.program.equations]

    def copied(self, producer: Equation, reader: Equation) -> bool:
        if not producer.has(Trait.BROADCAST) or reader.has(Trait.BROADCAST):
            return False
        return items_of_threads(producer) is not None and items_of_threads(reader) is not None

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        if self.found[producer] is None or self.found[reader] is None or self._is_argument(groups.equations[reader]):
            return False
        members = groups.members[groups.of[producer]] + groups.members[groups.of[reader]]
        return self._fits(groups, sorted(members))

    def _is_argument(self, e: Equation) -> bool:
        """Whether only a reduction over items reads loops, and it can compute them from an array of the same size."""
        (y, *others), of = e.outputs, self.program.readers
        if others or y in self.outputs or not by_element(e) or len(of.get(y, ())) != 1:
            return False
        (reader,) = of[y]
        return reader.has(Trait.REDUCTION) and reader.items is None and sum(v.nbytes for v in e.inputs) < 2 * y.nbytes

    def _fits(self, groups: Groups, members: Sequence[int]) -> bool:
        equations, found = [groups.equations[i] for i in members], [self.found[i] for i in members]
        split = _split(equations, found)
        if split is None:
            return False
        own = set(equations)
        made = {v for e in equations for v in e.outputs}
        stored = {v for v in made if v in self.outputs or not own.issuperset(self.program.readers.get(v, ()))}
        read = {v for e in equations for v in e.inputs} - made - split.shared
        if any(v.size > MAX_ELEMENTS * split.count for v in stored | read):
            return False
        has_large = any(v.size > MAX_ELEMENTS * split.count for v in made)
        most = MAX_OPERATIONS_WITH_LARGE if has_large else MAX_OPERATIONS
        few = sum(operations(e, split.count) for e in equations) <= most
        return few and _most_live(equations, split, stored) <= MAX_LIVE

    @cached_property
    def outputs(self) -> Collection[Variable]:
        return frozenset(self.program.outputs)

    def saves(self, equations: Sequence[Equation]) -> bool:
        return sum(not e.has(Trait.RESHAPE) for e in equations) > 1

    def alone(self, equation: Equation, readers: Sequence[Equation]) -> bool:
        found = items_of_threads(equation)
        if found is None or not equation.has(Trait.MATMUL):
            return False
        split = _split([equation], [found])
        if split is None:
            return False
        sizes = (v.size for v in (*equation.inputs, *equation.outputs) if v not in split.shared)
        few = all(size <= MAX_ELEMENTS * split.count for size in sizes)
        return few and operations(equation, split.count) <= MAX_OPERATIONS


@dataclass(frozen=True)
class _Split:
    """How equations divide their work into items.

    Attributes:
        shared: the arguments that all items share.
    """

    count: int
    shared: frozenset[Variable]


def items_of_threads(e: Equation) -> Items | None:
    """How an equation works item by item. None if it does not, or has few or large items, or no rule for a thread."""
    found = e.outer_items if e.has(Trait.RESHAPE) else e.items
    if found is None or found.count < MIN_ITEMS or not has_rule(e):
        return None
    sizes = [v.size for v, own in zip(e.inputs, found.flags, strict=True) if own] + [v.size for v in e.outputs]
    return found if min(sizes) > 0 and max(sizes) <= MAX_INSIDE * found.count else None


def _split(equations: Sequence[Equation], found: Sequence[Items | None]) -> _Split | None:
    """How equations work by the same items; None if they do not."""
    counts = {items.count for items in found if items is not None}
    count = min(counts)
    if any(n % count for n in counts):
        return None
    own, shared = set[Variable](), set[Variable]()
    for e, items in zip(equations, found, strict=True):
        assert items is not None
        own.update(e.outputs)
        for v, by_item in zip(e.inputs, items.flags, strict=True):
            (own if by_item else shared).add(v)
    if not own.isdisjoint(shared) or any(v.type.shape[0] % count for v in own):
        return None
    if sum(v.nbytes for v in shared) > MAX_SHARED_BYTES:
        return None
    return _Split(count, frozenset(shared))


def _most_live(equations: Sequence[Equation], split: _Split, stored: Collection[Variable]) -> int:
    """The most elements of an item that a thread holds at once, in the order of the equations.

    An element that an elementwise equation computes is not held if it is only stored, or only added to a sum. What such
    an equation reads is not held longer than each element is read. Arguments are read from memory again.
    """
    made = {v for e in equations for v in e.outputs}
    last = {v: i for i, e in enumerate(equations) for v in (*e.inputs, *e.outputs) if v in made}
    summed = {v for e in equations if e.has(Trait.REDUCTION) for v in e.inputs}
    summed -= {v for e in equations if not e.has(Trait.REDUCTION) for v in e.inputs} | set(stored)
    held, most = dict[Variable, int](), 0
    for i, e in enumerate(equations):
        whole = not by_element(e)
        read = sum(v.size for v in e.inputs if whole and v not in made | split.shared) // split.count
        held = {v: n for v, n in held.items() if whole or last[v] > i}
        held |= {v: v.size // split.count for v in e.outputs if whole or (last[v] > i and v not in summed)}
        most = max(most, read + sum(held.values()))
        held = {v: n for v, n in held.items() if last[v] > i}
    return most


def _kernels(equation: Equation, lowering: Lowering) -> list[Kernel]:
    body: Program = equation.params["body"]
    split = _split(body.equations, [items_of_threads(e) for e in body.equations])
    assert split is not None
    return [kernel(THREAD_ITEMS, [thread_items(body, split.count, split.shared)], THREADS, resident=RESIDENT)]


define(Form(THREAD_ITEMS, _kernels, overwrites=lambda equation, argument, result: argument not in equation.inputs))
