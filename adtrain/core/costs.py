"""The costs of a Program's equations: FLOPs, and bytes read and written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from adtrain.core.primitive import Cost
from adtrain.core.program import Equation, Variable


def reads(equations: Sequence[Equation]) -> Iterator[Counter[Variable]]:
    """For each equation the number of elements that it reads of each variable; repeated reads count once.

    Reads of a view count as reads of the variable behind it. Of a row that is broadcast, that is one row.
    """
    viewed: dict[Variable, Variable] = {}
    for e in equations:
        found: Counter[Variable] = Counter()
        if e.primitive.view:
            viewed.update((out, viewed.get(v, v)) for v in e.inputs for out in e.outputs)
        else:
            for v, n in zip(e.inputs, e.elements_read, strict=True):
                source = viewed.get(v, v)
                found[source] = min(found[source] + n, source.size)
        yield found


def costs(equations: Sequence[Equation]) -> Iterator[Cost]:
    """The cost of each equation."""
    for e, read in zip(equations, reads(equations), strict=True):
        written = Counter({v: v.size for v in e.outputs if not e.primitive.view})
        moved = sum(n * v.type.dtype.itemsize for v, n in (read + written).items())
        yield Cost(e.cost.flops, moved)
