"""A partition of a Program's equations into groups to fuse, kept free of dependence cycles.

A topological order of the groups is kept while edges are added and groups are merged. After D. J. Pearce, P. H. J.
Kelly: "A Dynamic Topological Sort Algorithm for Directed Acyclic Graphs" (ACM Journal of Experimental Algorithmics 11,
2007): a change visits only the nodes between the two ends that depend on one another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from adtrain.core.program import Equation, Program, Variable

MAX_EQUATIONS = 128
"""Maximum equations of a kernel. Compilers need more than linear time for a long function, and kernels have a limited
number of arguments: elementwise equations with three each need at most 3 x 128 + 1."""


class TopologicalOrder:
    """Nodes 0, 1, ..., each after the nodes that it needs.

    Attributes:
        needs: for each node the nodes that it depends on directly.
        needed_by: for each node the nodes that depend on it directly.
        visited: the number of nodes that searches have visited, a measure of the work done.
    """

    def __init__(self, needs: Sequence[Collection[int]]) -> None:
        """``needs`` has only smaller numbers for each node."""
        self.needs = [set(nodes) for nodes in needs]
        self.needed_by: list[set[int]] = [set() for _ in needs]
        for node, earlier in enumerate(self.needs):
            for other in earlier:
                self.needed_by[other].add(node)
        self.position = list(range(len(needs)))
        self.visited = 0

    def reaches(self, a: int, b: int, through_others: bool = False) -> bool:
        """Whether ``b`` depends on ``a``; with ``through_others``, whether it does so by way of another node."""
        position, end = self.position, self.position[b]
        if position[a] >= end:
            return False
        seen, stack = {a}, [a]
        while stack:
            node = stack.pop()
            self.visited += 1
            for later in self.needed_by[node]:
                if later == b and not (through_others and node == a):
                    return True
                if position[later] < end and later not in seen:
                    seen.add(later)
                    stack.append(later)
        return False

    def add_edge(self, a: int, b: int) -> None:
        """Let ``b`` need ``a``, which does not depend on it."""
        if self.position[a] > self.position[b]:
            self._move(b, a, [*self._before(a, b), a], [b, *self._after(b, a)])
        self.needs[b].add(a)
        self.needed_by[a].add(b)

    def merge(self, target: int, source: int) -> None:
        """Make one node of two, named ``target``; no path leads from one to the other through a third."""
        first, last = sorted((target, source), key=self.position.__getitem__)
        before, after = self._before(last, first), self._after(first, last)
        self._move(first, last, [*before, target], after)
        for edges, back in ((self.needs, self.needed_by), (self.needed_by, self.needs)):
            for other in edges[source]:
                back[other].discard(source)
                if other != target:
                    back[other].add(target)
                    edges[target].add(other)
            edges[source] = set()
            edges[target].discard(source)

    def _before(self, node: int, limit: int) -> list[int]:
        """What ``node`` depends on at positions after that of ``limit``, in order."""
        return self._search(self.needs, node, self.position[limit], self.position[node])

    def _after(self, node: int, limit: int) -> list[int]:
        """What depends on ``node`` at positions before that of ``limit``, in order."""
        return self._search(self.needed_by, node, self.position[node], self.position[limit])

    def _search(self, edges: Sequence[set[int]], node: int, start: int, end: int) -> list[int]:
        found: set[int] = set()
        stack = [node]
        while stack:
            self.visited += 1
            new = {n for n in edges[stack.pop()] if start < self.position[n] < end} - found
            found |= new
            stack.extend(new)
        return sorted(found, key=self.position.__getitem__)

    def _move(self, first: int, last: int, before: Sequence[int], after: Sequence[int]) -> None:
        """Give ``before``, then ``after``, the positions that these nodes and the two ends have."""
        free = sorted({self.position[n] for n in (first, last, *before, *after)})
        for node, position in zip(before, free, strict=False):
            self.position[node] = position
        for node, position in zip(reversed(after), reversed(free), strict=False):
            self.position[node] = position


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
        self.producer = program.positions
        self.of = list(range(len(self.equations)))
        self.members: dict[int, list[int]] = {i: [i] for i in self.of}
        self.limit = limit
        self.counts = [0 if math.isinf(limit) else _count(e) for e in self.equations]
        """The number of equations in each group, where it is limited."""
        self.order = TopologicalOrder(program.needs)

    def group_of(self, i: int) -> list[Equation]:
        """The equations of the group that equation number ``i`` is in."""
        return [self.equations[k] for k in self.members[self.of[i]]]

    def producers(self, group: int) -> set[int]:
        """The other groups that a group reads from."""
        return self.order.needs[group]

    def are_independent(self, i: int, j: int) -> bool:
        """Whether the groups of two equations do not depend on each other, and can be merged."""
        a, b = self.of[i], self.of[j]
        return not (a in self.producers(b) or b in self.producers(a)) and self.can_merge(a, b)

    def merge_independent(self, i: int, j: int) -> bool:
        """Merge the groups of two equations if they are independent. Returns whether they are."""
        if independent := self.are_independent(i, j):
            self.merge(self.of[i], self.of[j])
        return independent

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
