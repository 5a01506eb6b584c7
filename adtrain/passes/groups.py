"""What the fusing passes share: a partition of a Program's equations that stays free of cycles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from adtrain.core.program import Equation, Program, Variable


class Groups:
    """A partition of the equations; at first each is alone. Groups are named by their first member's position."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.equations = program.equations
        self.producer = {v: i for i, e in enumerate(self.equations) for v in e.outputs}
        self.of = list(range(len(self.equations)))
        self.members: dict[int, list[int]] = {i: [i] for i in self.of}
        # For each group a bit for each equation that must have run before the group can be complete.
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
        """Whether no value leaves the two and comes back to them through a third."""
        if a == b:
            return False
        mine = sum(1 << i for g in (a, b) for i in self.members[g])
        outside = (self.producers(a) | self.producers(b)) - {a, b}
        return not any((self._before[p] | 1 << p) & mine for p in outside)

    def merge(self, a: int, b: int) -> None:
        """Make one group of two."""
        kept, gone = min(a, b), max(a, b)
        self.members[kept] = sorted(self.members[kept] + self.members.pop(gone))
        mine = 0
        for i in self.members[kept]:
            self.of[i] = kept
            mine |= 1 << i
        before = (self._before[kept] | self._before.pop(gone)) & ~mine
        self._before[kept] = before
        for group, earlier in self._before.items():
            if group != kept and earlier & mine:
                self._before[group] = earlier | mine | before

    def rewritten(
        self,
        fuse: Callable[[Sequence[Equation], Sequence[Variable]], Equation],
        anchor: Callable[[Sequence[int]], int] = max,
    ) -> Program:
        """The Program with one equation in place of each group of several.

        Args:
            fuse: makes it of the members and of those of their outputs that others need.
            anchor: of the members' positions the one where the fused equation should stand, if its inputs allow.
        """
        readers: dict[Variable, set[int]] = {v: {-1} for v in self.program.outputs}
        for i, e in enumerate(self.equations):
            for v in e.inputs:
                readers.setdefault(v, set()).add(self.of[i])
        done: set[int] = set()
        ordered: list[Equation] = []
        for first in sorted(self.members, key=lambda g: anchor(self.members[g])):
            stack = [first]
            while stack:  # depth first: what a group reads stands before it
                group = stack[-1]
                missing = self.producers(group) - done
                if group in done or not missing:
                    stack.pop()
                    if group not in done:
                        done.add(group)
                        ordered.append(self._equation(group, readers, fuse))
                else:
                    stack.extend(sorted(missing, reverse=True))
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
        made = [v for e in equations for v in e.outputs]
        return fuse(equations, [v for v in made if readers.get(v, set()) - {group}])
