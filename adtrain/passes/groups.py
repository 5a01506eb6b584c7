"""A partition of a Program's equations into groups to fuse, kept free of dependence cycles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from adtrain.core.program import Equation, Program, Variable


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
    """A partition of the equations, at first one group each. A group is named by the position of its first member."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.equations = program.equations
        self.producer = {v: i for i, e in enumerate(self.equations) for v in e.outputs}
        self.of = list(range(len(self.equations)))
        self.members: dict[int, list[int]] = {i: [i] for i in self.of}
        # For each group a bit set of the equations that it depends on, directly or indirectly.
        self._before: dict[int, int] = {}
        for i in self.of:
            self._before[i] = 0
            for p in self.producers(i):
                self._before[i] |= self._before[p] | 1 << p

    def producers(self, group: int) -> set[int]:
        """The other groups that a group reads from."""
        inputs = (v for i in self.members[group] for v in self.equations[i].inputs)
        return {self.of[self.producer[v]] for v in inputs if v in self.producer} - {group}

    def can_merge(self, a: int, b: int) -> bool:
        """Whether merging makes no cycle: no value may leave the two groups and return through a third."""
        if a == b:
            return False
        mine = sum(1 << i for g in (a, b) for i in self.members[g])
        outside = (self.producers(a) | self.producers(b)) - {a, b}
        return not any((self._before[p] | 1 << p) & mine for p in outside)

    def merge(self, a: int, b: int) -> None:
        """Make one group of two."""
        target, source = min(a, b), max(a, b)
        self.members[target] = sorted(self.members[target] + self.members.pop(source))
        mine = 0
        for i in self.members[target]:
            self.of[i] = target
            mine |= 1 << i
        before = (self._before[target] | self._before.pop(source)) & ~mine
        self._before[target] = before
        for group, earlier in self._before.items():
            if group != target and earlier & mine:
                self._before[group] = earlier | mine | before

    def rewritten(
        self,
        fuse: Callable[[Sequence[Equation], Sequence[Variable]], Equation],
        anchor: Callable[[Sequence[int]], int] = max,
    ) -> Program:
        """The Program with one equation in place of each group of several.

        Args:
            fuse: returns it, from the members and the outputs that other groups need.
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
