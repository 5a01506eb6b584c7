"""What the equations of a Program cost, in FLOPs and in bytes read and written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from adtrain.core.primitive import Cost
from adtrain.core.program import Equation, Variable


def reads(equations: Sequence[Equation]) -> Iterator[Counter[Variable]]:
    """For each equation how many elements it reads of which variable, each at most once.

    Who reads a view reads the variable that it shows: of a row repeated for a whole batch, the one row.
    """
    shown: dict[Variable, Variable] = {}
    for e in equations:
        found: Counter[Variable] = Counter()
        if e.primitive.view:
            shown.update((out, shown.get(v, v)) for v in e.inputs for out in e.outputs)
        else:
            counts = e.primitive.elements_read([v.type for v in e.inputs], e.params)
            for v, n in zip(e.inputs, counts, strict=True):
                source = shown.get(v, v)
                found[source] = min(found[source] + n, source.size)
        yield found


def costs(equations: Sequence[Equation]) -> Iterator[Cost]:
    """The cost of each equation."""
    for e, read in zip(equations, reads(equations), strict=True):
        written = Counter({v: v.size for v in e.outputs if not e.primitive.view})
        moved = sum(n * v.type.dtype.itemsize for v, n in (read + written).items())
        yield Cost(e.primitive.cost([v.type for v in e.inputs], e.params).flops, moved)
