"""A topological order of a graph's nodes that is kept while edges are added and nodes are merged.

After D. J. Pearce, P. H. J. Kelly: "A Dynamic Topological Sort Algorithm for Directed Acyclic Graphs" (ACM Journal of
Experimental Algorithmics 11, 2007): a change visits only the nodes between the two ends that depend on one another.
"""

from __future__ import annotations

from collections.abc import Sequence


class TopologicalOrder:
    """Nodes 0, 1, ..., each after the nodes that it needs.

    Attributes:
        needs: for each node the nodes that it depends on directly.
        needed_by: for each node the nodes that depend on it directly.
        visited: the number of nodes that searches have visited, a measure of the work done.
    """

    def __init__(self, needs: Sequence[set[int]]) -> None:
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
