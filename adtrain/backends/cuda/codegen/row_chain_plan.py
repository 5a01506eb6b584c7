"""The plan of a chain of rows: which values a thread block keeps, when, and where.

A block computes a tile of rows in steps, with a barrier before each. A step computes products whose factors are ready,
and elementwise equations of their results. Its threads compute the same rows and columns of all these, so elementwise
values pass from one to another in registers.

- A value that is a factor of a product, or is read at another column than its own, is stored in shared memory.
- A product, or a value that calls a function such as tanh, is kept for later steps that read it at its own column. The
  thread that will read it writes it to scratch memory, which stays in the L2 cache.
- Stored and kept values are float32. An argument of another type, such as a mask, is read from memory where an element
  needs it. The float32 value that is computed from it is stored or kept, so that few steps read the argument.

Other values are computed again where they are needed, such as the derivative 1 - y^2 from y. A factor that is used
again much later is also stored again: the memory between its uses serves others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, prod

import numpy as np

from adtrain.backends.cuda.codegen.loops import flat
from adtrain.core.precision import FULL
from adtrain.core.primitive import Trait
from adtrain.core.program import LOOPS, Equation, Program, Variable
from adtrain.passes.fusion import elementwise
from adtrain.passes.simplify import merge_common_subexpressions, needed_for

FLOAT32 = np.dtype("float32")
MAX_WIDTH = 128
"""Maximum columns of a value."""
MAX_INLINE = 4
"""Maximum K of products that are computed element by element, by FMA, where they are needed."""
MAX_GAP = 2
"""Steps between two uses of a factor over which it stays in shared memory, though it can be computed again."""
BEFORE = 0.5
"""The time, in steps, from the additions of a step to sums until its products and elementwise equations. A barrier is
between them."""
CALL = re.compile(r"\b(?!fma\b|T\b|U\b)[a-z]\w*\(")
"""A call of a function in the text of an elementwise equation."""
MOVES = ("concatenate", "slice", "pad")
"""Primitives whose results have elements of arguments at other columns."""


def width(v: Variable) -> int:
    """The columns of a value by row."""
    return prod(v.type.shape[1:])


def is_rows(v: Variable, count: int) -> bool:
    """Whether a value has `count` rows that are vectors of at most MAX_WIDTH elements."""
    first, lengths = v.type.shape[:1], [n for n in v.type.shape[1:] if n != 1]
    return first == (count,) and len(lengths) <= 1 and 0 < width(v) <= MAX_WIDTH


def padded(n: int) -> int:
    """`n` rounded up to the columns of a tile of tensor cores."""
    return -(-n // 8) * 8


def pitch(n: int) -> int:
    """The floats from a row of `n` columns to the next in shared memory; see `kernels/cuda/gemm/row_chain.cuh`."""
    if n <= MAX_INLINE:  # of no product by a weight
        return n
    return padded(n) if padded(n) % 16 else padded(n) + 8


def weight_pitch(n: int) -> int:
    """The floats from a row of a weight of `n` columns to the next in shared memory."""
    return padded(n) + 4


def is_by_row(e: Equation, count: int) -> bool:
    """Whether an equation works by `count` rows, and a thread block can compute it for a tile of them."""
    if not all(is_rows(v, count) for v in e.outputs):
        return False
    if e.has(Trait.MATMUL):
        if not is_plain(e) or e.params["transpose_a"]:
            return False
        a, b = e.inputs
        return (
            a is not b
            and is_rows(a, count)
            and len(a.type.shape) == len(b.type.shape) == 2
            and b.type.shape[0] != count
        )
    if e.has(Trait.RESHAPE) or e.name in MOVES:
        return all(is_rows(v, count) for v in e.inputs) and (e.has(Trait.RESHAPE) or e.items is not None)
    if e.form:
        return e.form == LOOPS and all(is_by_row(x, count) for x in e.params["body"].equations)
    return elementwise(e) and (e.name == "full" or e.items is not None)


def is_plain(product: Equation) -> bool:
    """Whether a product is one of float32, in full precision."""
    return bool(product.params["precision"] == FULL and product.outputs[0].type.dtype == FLOAT32)


def sums_rows(e: Equation, count: int) -> bool:
    """Whether an equation is a sum over `count` rows: a product of two values by row, or a sum of one."""
    if e.has(Trait.MATMUL):
        plain = is_plain(e) and e.params["transpose_a"] and not e.params["transpose_b"]
        return plain and all(is_rows(v, count) and len(v.type.shape) == 2 for v in e.inputs)
    if e.primitive.name != "sum" or not is_rows(e.inputs[0], count) or e.outputs[0].type.dtype != FLOAT32:
        return False
    return 0 in e.params["axes"] and e.outputs[0].size in (1, width(e.inputs[0]))


@dataclass(eq=False)
class Place:
    """A value in memory from the step that computes it to the last one that reads it.

    Attributes:
        at: its first float.
    """

    value: Variable
    begin: int
    end: float
    at: int = 0


@dataclass(eq=False)
class RowSum:
    """A sum over rows: of products X^T Y, or of the columns of X, where there is no Y.

    Attributes:
        result: the sum, an output or an argument of the equations after the sums.
        terms: the arguments X and Y, and the step with which the term is added.
    """

    result: Variable
    terms: list[tuple[int, Variable, Variable | None]]

    @property
    def shape(self) -> tuple[int, int]:
        """The rows and columns of the accumulators."""
        _, x, y = self.terms[0]
        return (1, width(x)) if y is None else (width(x), width(y))

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class Following:
    """Sums of one shape, and the elementwise equations that read them or each other."""

    sums: Sequence[RowSum]
    after: Sequence[Equation]


@dataclass
class Plan:
    """See the module.

    Attributes:
        count: the rows.
        body: the equations. Each loop is replaced by the equations in it.
        level: of each value by row, the first step in which it can be computed. -1: it is an argument.
        places: the places of each value in shared memory, in the order of their steps.
        kept: the places in scratch memory of values that later steps read at their own column.
        targets: the values that each step computes to store them.
        sums: the sums over rows.
        after: the equations that follow the sums.
        stored: the values that later steps read from memory, because computing them again takes too long.
    """

    count: int
    body: Program
    level: dict[Variable, int] = field(default_factory=dict)
    places: dict[Variable, list[Place]] = field(default_factory=dict)
    kept: dict[Variable, Place] = field(default_factory=dict)
    targets: list[dict[Variable, None]] = field(default_factory=list)
    sums: list[RowSum] = field(default_factory=list)
    after: list[Equation] = field(default_factory=list)
    stored: set[Variable] = field(default_factory=set)

    @cached_property
    def producer(self) -> Mapping[Variable, Equation]:
        return {v: e for e in self.body.equations for v in e.outputs}

    @cached_property
    def groups(self) -> Sequence[Following]:
        """The sums whose totals the same equations read, and the equations that follow them."""
        of = {total.result: i for i, total in enumerate(self.sums)}
        found = {i: ([total], list[Equation]()) for i, total in enumerate(self.sums)}
        others: list[Equation] = []
        for e in self.after:
            read = list(dict.fromkeys(of[v] for v in e.inputs if v in of))
            if not read:  # it computes what another equation needs beside the sums
                others.append(e)
                continue
            into = read[0]
            for other in read[1:]:
                sums, after = found.pop(other)
                found[into] = [*found[into][0], *sums], [*found[into][1], *after]
                of |= {v: into for v, i in of.items() if i == other}
            found[into][1].append(e)
            of |= dict.fromkeys(e.outputs, into)

        def following(sums: list[RowSum], after: list[Equation]) -> Following:
            needed = needed_for([v for e in after for v in e.inputs], others)
            return Following(sums, [*needed, *(e for e in self.after if e in after)])

        return [following(*each) for each in found.values()]

    @cached_property
    def weights(self) -> Sequence[Variable]:
        """The factors of products that all rows share."""
        products = (e for e in self.body.equations if e.has(Trait.MATMUL) and e.outputs[0] in self.level)
        return tuple(dict.fromkeys(e.inputs[1] for e in products))

    @cached_property
    def factors(self) -> Collection[Variable]:
        """The values by row of more than MAX_INLINE columns that are factors of products, or summed over the rows."""
        of_products = [e.inputs[0] for own in self.products.values() for e in own]
        of_sums = [v for total in self.sums for _, *own in total.terms for v in own if v is not None]
        return {v for v in (*of_products, *of_sums) if width(v) > MAX_INLINE}

    @cached_property
    def tensor_weights(self) -> Collection[Variable]:
        """The weights that tensor cores multiply."""
        return {e.inputs[1] for own in self.products.values() for e in own}

    @cached_property
    def inline_weights(self) -> Collection[Variable]:
        """The weights whose products are computed element by element."""
        products = (e for e in self.body.equations if e.has(Trait.MATMUL) and e.outputs[0] in self.level)
        return {e.inputs[1] for e in products if not self.is_product(e)}

    @cached_property
    def scalars(self) -> Sequence[Variable]:
        """The other arguments that all rows share, of one element."""
        return tuple(v for v in self._shared if v.size == 1)

    @cached_property
    def vectors(self) -> Sequence[Variable]:
        """The other arguments of float32 that all rows share, of several elements."""
        return tuple(v for v in self._shared if v.size > 1 and v.type.dtype == FLOAT32)

    @cached_property
    def _shared(self) -> Sequence[Variable]:
        by_row = (e for e in self.body.equations if e.outputs[0] in self.level and not e.has(Trait.MATMUL))
        return tuple(dict.fromkeys(v for e in by_row for v in e.inputs if v not in self.level))

    @property
    def steps(self) -> int:
        return len(self.targets)

    def place(self, v: Variable, step: float) -> Place | None:
        """Where a value can be read in a step, or before it by sums, if it is stored then."""
        return next((x for x in self.places.get(v, ()) if x.begin < step <= x.end), None)

    @cached_property
    def products(self) -> Mapping[int, Sequence[Equation]]:
        """The products of each step that has some."""
        found: dict[int, list[Equation]] = {}
        for e in filter(self.is_product, self.body.equations):
            found.setdefault(self.level[e.outputs[0]], []).append(e)
        return found

    def is_product(self, e: Equation) -> bool:
        """Whether tensor cores compute an equation for a tile of rows."""
        return e.has(Trait.MATMUL) and e.outputs[0] in self.level and width(e.inputs[0]) > MAX_INLINE

    def crosses(self, e: Equation, v: Variable) -> bool:
        """Whether an element of a result needs elements of a value by row in other columns."""
        return e.name in MOVES or e.has(Trait.MATMUL) or width(v) != width(e.outputs[0])


def plan_chain(body: Program, count: int) -> Plan | None:
    """The plan of a chain of `count` rows. None if it has values other than float32 that it must store."""
    body = merge_common_subexpressions(flat(body))
    plan = Plan(count, body)
    own = [v for e in body.equations if is_by_row(e, count) or sums_rows(e, count) for v in e.inputs]
    made = {v for e in body.equations for v in e.outputs}
    for v in own:
        if v not in made and is_rows(v, count):
            plan.level[v] = -1
    _find_levels(plan)
    _find_sums(plan)
    follow = {v for group in plan.groups for e in group.after for v in e.outputs} | {x.result for x in plan.sums}
    if not plan.level or any(v not in plan.level and v not in follow for v in body.outputs):
        return None
    _find_places(plan)
    stored = (*plan.places, *plan.kept, *plan.weights, *(x.result for x in plan.sums))
    return plan if all(v.type.dtype == FLOAT32 for v in stored) else None


def _find_levels(plan: Plan) -> None:
    others = {v for v in plan.level if v.type.dtype != FLOAT32}  # and values of other types that are computed from them
    converted = set[Variable]()  # float32 values that are computed from `others`
    for e in plan.body.equations:
        if not is_by_row(e, plan.count):
            continue
        level = 0
        for v in e.inputs:
            own = plan.level.get(v)
            if own is None:
                continue
            if e.has(Trait.MATMUL) and width(e.inputs[0]) > MAX_INLINE:
                level = max(level, own + 1, 1)
            elif (own > 0 or v in converted) and plan.crosses(e, v):
                level = max(level, own + 1)
                plan.stored.add(v)
            else:
                level = max(level, own)
        plan.level |= dict.fromkeys(e.outputs, level)
        if not others.isdisjoint(e.inputs):
            (converted if e.outputs[0].type.dtype == FLOAT32 else others).update(e.outputs)
        if plan.is_product(e) or (_calls(e) and e.outputs[0].type.dtype == FLOAT32):
            plan.stored.update(e.outputs)
    plan.stored |= converted


def _calls(e: Equation) -> bool:
    """Whether an elementwise equation calls a function, such as tanh."""
    text = e.primitive.expression
    if callable(text):
        text = text(**e.params)
    return text is not None and CALL.search(text) is not None


def _find_sums(plan: Plan) -> None:
    """The sums over rows. A sum of such sums has the terms of all."""
    found: dict[Variable, RowSum] = {}
    body, readers = plan.body, plan.body.readers
    for e in body.equations:
        if e.outputs[0] in plan.level:
            continue
        (y,) = e.outputs
        if sums_rows(e, plan.count):
            step = max(1, *(plan.level[v] + 1 for v in e.inputs))
            x, *other = e.inputs
            found[y] = RowSum(y, [(step, x, other[0] if other else None)])
        elif (
            e.name == "add"
            and all(v in found and v not in body.outputs and len(readers[v]) == 1 for v in e.inputs)
            and _alike(*(found[v] for v in e.inputs))
        ):
            a, b = (found.pop(v) for v in e.inputs)
            found[y] = RowSum(y, [*a.terms, *b.terms])
        else:
            plan.after.append(e)
    plan.sums = list(found.values())


def _alike(a: RowSum, b: RowSum) -> bool:
    return a is not b and a.result.type == b.result.type and (a.terms[0][2] is None) == (b.terms[0][2] is None)


def _find_places(plan: Plan) -> None:
    products = [e for e in plan.body.equations if plan.is_product(e)]
    uses: dict[Variable, list[float]] = {}
    for e in products:
        uses.setdefault(e.inputs[0], []).append(plan.level[e.outputs[0]])
    for total in plan.sums:
        for step, *factors in total.terms:
            for v in factors:
                if v is not None:
                    uses.setdefault(v, []).append(step - BEFORE)
    levels = [plan.level[v] for e in plan.body.equations for v in e.outputs if v in plan.level]
    last = max((0, *levels, *(ceil(s) - 1 for own in uses.values() for s in own)))
    plan.targets = [{} for _ in range(last + 1)]
    for v, level in plan.level.items():
        if level < 0:
            if v.type.dtype == FLOAT32:
                plan.places[v] = [Place(v, -1, 0)]
        elif v in plan.body.outputs:
            plan.targets[level][v] = None
    for v, own in uses.items():
        if plan.level[v] < 0:
            plan.places[v][0].end = max(own)
            continue
        for use in sorted(own):
            _use_factor(plan, v, use)
    for step in range(last, -1, -1):
        _need(plan, step)
    for places in plan.places.values():
        places.sort(key=lambda place: place.begin)


def _use_factor(plan: Plan, v: Variable, step: float) -> None:
    """Note that a step reads a factor."""
    places, level = plan.places.setdefault(v, []), plan.level[v]
    if places and step - places[-1].end <= MAX_GAP:
        places[-1].end = step
        return
    begin = level if not places and step - level <= MAX_GAP + 1 else ceil(step) - 1
    places.append(Place(v, begin, step))
    plan.targets[begin][v] = None


def _need(plan: Plan, step: int) -> None:
    """Note what a step reads to compute its targets. It may add targets of earlier steps."""
    seen: set[tuple[Variable, bool]] = set()
    stack = [(v, False) for v in plan.targets[step]]
    while stack:
        v, crosses = stack.pop()
        level = plan.level.get(v)
        if level is None or (v, crosses) in seen:
            continue
        seen.add((v, crosses))
        if level < 0:
            for argument in plan.places.get(v, ()):
                argument.end = max(argument.end, step)
        elif (place := plan.place(v, step)) is not None:
            place.end = max(place.end, step)
        elif v in plan.stored and level < step:
            _store(plan, v, step, crosses)
        elif not plan.is_product(e := plan.producer[v]):
            stack += [(x, plan.crosses(e, x)) for x in e.inputs]


def _store(plan: Plan, v: Variable, step: int, crosses: bool) -> None:
    """Note that a later step reads a value: at its own column, or at other ones."""
    level = plan.level[v]
    plan.targets[level][v] = None
    if not crosses:
        place = plan.kept.setdefault(v, Place(v, level, step))
        place.end = max(place.end, step)
        return
    places = plan.places.setdefault(v, [])
    first = next((x for x in places if x.begin == level), None)
    if first is None:
        places.append(Place(v, level, step))
    else:
        first.end = max(first.end, step)


def arrange(places: Collection[Place], sizes: Mapping[Place, int]) -> int:
    """Give each place its memory, and return the floats of all. Places of the same time do not share memory."""
    done: list[Place] = []
    for place in sorted(places, key=lambda x: (x.begin, x.begin - x.end)):
        at = 0
        others = (x for x in done if x.begin <= place.end and place.begin <= x.end)
        for other in sorted(others, key=lambda x: x.at):
            if other.at >= at + sizes[place]:
                break
            at = max(at, other.at + sizes[other])
        place.at = at
        done.append(place)
    return max((place.at + sizes[place] for place in done), default=0)
