"""A partition of a Program's equations into groups to fuse, kept free of dependence cycles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.topological_order import TopologicalOrder

MAX_EQUATIONS = 128
"""Maximum equations of a kernel. Compilers need more than linear time for a long function, and kernels have a limited
number of arguments: elementwise equations with three each need at most 3 x 128 + 1."""


def producers_first(nodes: Iterable[int], producers: Callable[[int], set[int]]) -> list[int]:
    """``nodes`` and all nodes that they need, in the given order, but each after its ``producers``."""
    order: dict[int, None] = {}
    for first in nodes:
        stack = [first]
        while stack:
            node = stack[-1]
            missing = producers(node).difference(order)
            if missing and node not in order:
                stack.extend(sorted(missing, reverse=True))
            else:
                order[stack.pop()] = None
    return list(order)


class Groups:
    """A partition of the equations, at first one group each. A group is named by the position of its first member.

    Args:
        limit: maximum equations of a merged group; each equation in the body of a fused one counts.
    """

    def __init__(self, program: Program, limit: float = math.inf) -> None:
        self.program = program
        self.equations = program.equations
        self.producer = {v: i for i, e in enumerate(self.equations) for v in e.outputs}
        self.of = list(range(len(self.equations)))
        self.members: dict[int, list[int]] = {i: [i] for i in self.of}
        self.limit = limit
        self.counts = [0 if math.isinf(limit) else _count(e) for e in self.equations]
        """The number of equations in each group, where it is limited."""
        self.order = TopologicalOrder(
            [{self.producer[v] for v in e.inputs if v in self.producer} for e in self.equations]
        )

    def group_of(self, i: int) -> list[Equation]:
        """The equations of the group that equation number ``i`` is in."""
        return [self.equations[k] for k in self.members[self.of[i]]]

    def producers(self, group: int) -> set[int]:
        """The other groups that a group reads from."""
        return self.order.needs[group]

    def can_merge(self, a: int, b: int) -> bool:
        """Whether merging keeps to the limit and makes no cycle: no value may leave the two groups and return through
        a third."""
        if a == b or self.counts[a] + self.counts[b] > self.limit:
            return False
        return not (self.order.reaches(a, b, through_others=True) or self.order.reaches(b, a, through_others=True))

    def merge_all(self, positions: Sequence[int]) -> bool:
        """Make one group of the equations at these positions, in order. Return False and change nothing on a cycle."""
        nodes = {self.of[i] for i in positions}
        position, needed_by = self.order.position, self.order.needed_by
        end = max(position[node] for node in nodes)
        stack = [later for node in nodes for later in needed_by[node] - nodes]
        seen: set[int] = set()
        while stack:
            node = stack.pop()
            if node in nodes:
                return False
            if node not in seen and position[node] < end:
                seen.add(node)
                stack += needed_by[node]
        for i in positions[1:]:
            self.merge(self.of[positions[0]], self.of[i])
        return True

    def merge(self, a: int, b: int) -> None:
        """Make one group of two."""
        target, source = min(a, b), max(a, b)
        members, added = self.members[target], self.members.pop(source)
        in_order = members[-1] < added[0]
        members.extend(added)
        if not in_order:
            members.sort()
        for i in added:
            self.of[i] = target
        self.counts[target] += self.counts[source]
        self.order.merge(target, source)

    def rewritten(
        self,
        fuse: Callable[[Sequence[Equation], Sequence[Variable]], Equation],
        anchor: Callable[[Sequence[int]], int] = max,
    ) -> Program:
        """The Program with one equation in place of each group of several.

        Args:
            fuse: returns the equation of a group, from its members and the outputs that other groups need.
            anchor: picks, from the members' positions, where the fused equation should stand if its inputs allow.
        """
        readers: dict[Variable, set[int]] = {v: {-1} for v in self.program.outputs}
        for i, e in enumerate(self.equations):
            for v in e.inputs:
                readers.setdefault(v, set()).add(self.of[i])
        order = producers_first(sorted(self.members, key=lambda g: anchor(self.members[g])), self.producers)
        ordered = [self._equation(group, readers, fuse) for group in order]
        return replace(self.program, equations=tuple(ordered))

    def _equation(
        self,
        group: int,
        readers: dict[Variable, set[int]],
        fuse: Callable[[Sequence[Equation], Sequence[Variable]], Equation],
    ) -> Equation:
        equations = [self.equations[i] for i in self.members[group]]
        if len(equations) == 1:
            return equations[0]
        computed = [v for e in equations for v in e.outputs]
        return fuse(equations, [v for v in computed if readers.get(v, set()) - {group}])


def _count(equation: Equation) -> int:
    """The number of equations that a kernel for it computes."""
    body = equation.params.get("body")
    return sum(map(_count, body.equations)) if isinstance(body, Program) else 1
