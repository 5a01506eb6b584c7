"""Thread items: equations of many small items. One thread computes all equations for its item, in registers.

Examples: layers of a narrow network for many points, and products of small matrices. Item n of a result needs item n of
the arguments, and shared arrays, which all items need. If a reshape joins the rows of all items in axis 0, an item is
several neighbouring rows: a 4 x 4 matrix is four of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from adtrain.backends.cuda.codegen.part import Kernel, kernel
from adtrain.backends.cuda.codegen.register_rows import MANY_THREADS
from adtrain.backends.cuda.codegen.thread_items import STAGE_BYTES, THREADS, has_rule, operations, thread_items
from adtrain.backends.cuda.forms import Form, define
from adtrain.core.axes import Items
from adtrain.core.kernel import Target
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.fusion import Fusion, ProductFusion, by_element
from adtrain.passes.groups import MAX_EQUATIONS, Groups

THREAD_ITEMS = "thread_items"
"""Equations that work item by item. Each thread of a GPU computes all of them for its item."""

MIN_ITEMS = MANY_THREADS
"""Minimum items. Each has one thread."""
MAX_ELEMENTS = 64
"""Maximum elements of an item of an argument or a result of the kernel."""
MAX_INSIDE = 512
"""Maximum elements of an item of any value. Larger values than MAX_ELEMENTS stay inside the kernel."""
MAX_SHARED_BYTES = 24 << 10
"""Maximum bytes of shared arrays. Each block copies them to shared memory."""
MAX_OPERATIONS, MAX_OPERATIONS_WITH_LARGE = 2 << 10, 4 << 10
"""Maximum statements of a thread, in general and with a value of more than MAX_ELEMENTS elements.

Longer kernels do not fit in the instruction cache: the second derivatives of a network of 8 x 20 units take 1.17 times
as long with 4,096.
"""
RESIDENT = 3
"""Blocks for which a multiprocessor must have registers. So a thread has 168 registers."""
MAX_NARROW = 8
"""Maximum of K or of the columns, whichever is smaller, in a product that threads compute for their items.

Other kernels compute tiles, most of which would be empty.
"""
MAX_LIVE = 96
"""Maximum elements that a thread holds at once."""


class ThreadItemsFusion(Fusion):
    """Connected equations that work item by item, with few elements for each item.

    Elementwise equations that only a reduction over the items reads are left to its kernel, if they read less than
    twice the bytes that they write.
    """

    form = THREAD_ITEMS
    limit = MAX_EQUATIONS
    in_order = True

    @classmethod
    def runs_on(cls, target: Target) -> bool:
        return not target.by_member and target.shared >= STAGE_BYTES + MAX_SHARED_BYTES

    @cached_property
    def found(self) -> list[Items | None]:
        """How each equation works item by item; None for one that such a kernel cannot compute."""
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
        """Whether an elementwise equation is left to the kernel of a reduction over the items."""
        (y, *others), of = e.outputs, self.program.readers
        if others or y in self.outputs or not by_element(e) or len(of.get(y, ())) != 1:
            return False
        (reader,) = of[y]
        return reader.has(Trait.REDUCTION) and reader.items is None and sum(v.nbytes for v in e.inputs) < 2 * y.nbytes

    def _fits(self, groups: Groups, members: Sequence[int]) -> bool:
        equations, found = [groups.equations[i] for i in members], [self.found[i] for i in members]
        common = _common_items(equations, found)
        if common is None:
            return False
        own = set(equations)
        made = {v for e in equations for v in e.outputs}
        stored = {v for v in made if v in self.outputs or not own.issuperset(self.program.readers.get(v, ()))}
        read = {v for e in equations for v in e.inputs} - made - common.shared
        if any(v.size > MAX_ELEMENTS * common.count for v in stored | read):
            return False
        has_large = any(v.size > MAX_ELEMENTS * common.count for v in made)
        most = MAX_OPERATIONS_WITH_LARGE if has_large else MAX_OPERATIONS
        few = sum(operations(e, common.count) for e in equations) <= most
        return few and _most_live(equations, common, stored) <= MAX_LIVE

    def saves(self, equations: Sequence[Equation]) -> bool:
        return sum(not e.has(Trait.RESHAPE) for e in equations) > 1

    def alone(self, equation: Equation, readers: Sequence[Equation]) -> bool:
        found = items_of_threads(equation)
        if found is None or not equation.has(Trait.MATMUL):
            return False
        common = _common_items([equation], [found])
        if common is None:
            return False
        sizes = (v.size for v in (*equation.inputs, *equation.outputs) if v not in common.shared)
        few = all(size <= MAX_ELEMENTS * common.count for size in sizes)
        return few and operations(equation, common.count) <= MAX_OPERATIONS


class WideProductFusion(ProductFusion):
    """A matrix product with its epilogue, unless it is narrow and threads can compute its items."""

    def takes(self, product: Equation, epilogue: Equation) -> bool:
        return super().takes(product, epilogue) and not is_narrow(product, self.target)


def is_narrow(product: Equation, target: Target) -> bool:
    """Whether a product has a short K or few columns, and threads can compute its items."""
    found = items_of_threads(product) if ThreadItemsFusion.runs_on(target) else None
    if found is None or not product.has(Trait.MATMUL):
        return False
    columns, terms = (v.size // found.count for v in (product.outputs[0], product.inputs[0]))
    return min(columns, terms) <= MAX_NARROW and max(columns, terms) <= MAX_ELEMENTS


@dataclass(frozen=True)
class _CommonItems:
    """The items of equations that work by the same ones.

    Attributes:
        count: the number of items.
        shared: the shared arrays. Every item may need all of their elements.
    """

    count: int
    shared: frozenset[Variable]


def items_of_threads(e: Equation) -> Items | None:
    """How an equation works item by item; None if it does not, if items are few or large, or if threads lack a rule."""
    found = e.outer_items if e.has(Trait.RESHAPE) else e.items
    if found is None or found.count < MIN_ITEMS or not has_rule(e):
        return None
    sizes = [v.size for v, own in zip(e.inputs, found.flags, strict=True) if own] + [v.size for v in e.outputs]
    return found if min(sizes) > 0 and max(sizes) <= MAX_INSIDE * found.count else None


def _common_items(equations: Sequence[Equation], found: Sequence[Items | None]) -> _CommonItems | None:
    """The items of equations; None if they do not work by the same ones, or share too large arrays."""
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
    return _CommonItems(count, frozenset(shared))


def _most_live(equations: Sequence[Equation], items: _CommonItems, stored: Collection[Variable]) -> int:
    """The most elements of an item that a thread holds at once, in the order of the equations.

    A result of an elementwise equation is not held if it is only stored, or only reduced. An elementwise equation that
    reads a value last frees the registers of each element, and reads arguments from memory again.
    """
    made = {v for e in equations for v in e.outputs}
    last = {v: i for i, e in enumerate(equations) for v in (*e.inputs, *e.outputs) if v in made}
    summed = {v for e in equations if e.has(Trait.REDUCTION) for v in e.inputs}
    summed -= {v for e in equations if not e.has(Trait.REDUCTION) for v in e.inputs} | set(stored)
    held, most = dict[Variable, int](), 0
    for i, e in enumerate(equations):
        whole = not by_element(e)
        read = sum(v.size for v in e.inputs if whole and v not in made | items.shared) // items.count
        held = {v: n for v, n in held.items() if whole or last[v] > i}
        held |= {v: v.size // items.count for v in e.outputs if whole or (last[v] > i and v not in summed)}
        most = max(most, read + sum(held.values()))
        held = {v: n for v, n in held.items() if last[v] > i}
    return most


def _kernels(equation: Equation, target: Target) -> list[Kernel]:
    body: Program = equation.params["body"]
    items = _common_items(body.equations, [items_of_threads(e) for e in body.equations])
    assert items is not None
    return [kernel(THREAD_ITEMS, [thread_items(body, items.count, items.shared)], THREADS, resident=RESIDENT)]


define(Form(THREAD_ITEMS, _kernels, overwrites=lambda equation, argument, result: argument not in equation.inputs))
