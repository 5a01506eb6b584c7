"""The fusion pass: equations that a form can compute together become one equation of the form.

A form is a kind of kernel; see `adtrain.core.fused`. Its `Fusion` says which equations may share a kernel. This pass
copies cheap equations for their readers, merges groups, keeps them free of dependence cycles, and replaces each group
by one equation. A device applies it once for each of its forms, in its order of preference.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from adtrain.core.fused import fuse, renamed
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Results
from adtrain.core.target import Target
from adtrain.passes.groups import Groups


class Fusion:
    """Which equations of a Program a form can compute together. Each form has a subclass.

    Attributes:
        form: the form of the fused equations.
        limit: maximum equations of a kernel.
        early: whether a fused equation stands at the position of its first member, not of its last one. So arguments
            of the first member need not stay in memory.
        in_order: whether groups merge in the order of the equations. Otherwise the merge that saves the most bytes in
            memory comes first.
        program: the Program.
        target: the GPU.
    """

    form: ClassVar[str]
    limit: ClassVar[float] = math.inf
    early: ClassVar[bool] = False
    in_order: ClassVar[bool] = False

    def __init__(self, program: Program, target: Target | None = None) -> None:
        self.program, self._target = program, target

    @property
    def target(self) -> Target:
        assert self._target is not None, f"{self.form}: the CPU has no target"
        return self._target

    @classmethod
    def runs_on(cls, target: Target) -> bool:
        """Whether a GPU has kernels of the form."""
        return True

    def prepared(self) -> Program:
        """The Program with the copies that ``copied`` asks for."""
        return with_copies(self.program, self.copied)

    def copied(self, producer: Equation, reader: Equation) -> bool:
        """Whether ``reader`` gets a copy of ``producer``, whose results it reads, to compute them itself."""
        return False

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        """Whether the groups of two equations become one. ``reader`` reads ``value``, which ``producer`` computes."""
        return False

    def together(self, groups: Groups) -> Iterable[Iterable[int]]:
        """Lists of independent equations. Those of a list share a kernel."""
        return ()

    def saves(self, equations: Sequence[Equation]) -> bool:
        """Whether one kernel for the equations of a group saves time. Otherwise they stay as they are."""
        return True

    def alone(self, equation: Equation, readers: Sequence[Equation]) -> bool:
        """Whether an equation that shares no kernel becomes an equation of the form, too; ``readers`` read it."""
        return False

    def fused(self, equations: Sequence[Equation], needed: Sequence[Variable]) -> Equation:
        """The equation of a group; ``needed`` are its results that other equations read."""
        return fuse(self.form, equations, needed)

    @cached_property
    def readers(self) -> Counter[Variable]:
        """The number of equations that read each variable. An output of the Program counts once more."""
        read = (v for e in self.program.equations for v in dict.fromkeys(e.inputs))
        return Counter((*self.program.outputs, *read))


_OF_USERS: dict[str, list[type[Fusion]]] = {"cpu": [], "cuda": []}


def register_fusion(fusion: type[Fusion], backend: str) -> None:
    """Let ``backend`` fuse equations to those of a form of the user. It comes before the device's own forms, after the
    fusion of elementwise equations. The kernels of the form are registered under its name; see `registry.register`.

    Args:
        backend: "cpu" or "cuda".

    Raises:
        ValueError: there is no such backend, or it has such a fusion already.
    """
    if backend not in _OF_USERS:
        raise ValueError(f"register_fusion: found backend {backend!r}, expected 'cpu' or 'cuda'")
    if any(fusion.form == other.form for other in _OF_USERS[backend]):
        raise ValueError(f"register_fusion: {backend!r} already has a fusion of the form {fusion.form!r}")
    _OF_USERS[backend].append(fusion)


def forget_fusion(fusion: type[Fusion]) -> None:
    """Remove a fusion from all backends."""
    for fusions in _OF_USERS.values():
        if fusion in fusions:
            fusions.remove(fusion)


def fusions_of_users(backend: str) -> Sequence[type[Fusion]]:
    """What `register_fusion` has added to "cpu" or "cuda"."""
    return tuple(_OF_USERS[backend])


@dataclass(frozen=True)
class FusionPass:
    """The pass for one form."""

    results: ClassVar = Results.EXACT
    """The body of a fused equation has the equations that it replaces."""
    fusion: type[Fusion]
    target: Target | None = None

    @property
    def __name__(self) -> str:
        return f"fuse_{self.fusion.form}"

    def __call__(self, program: Program) -> Program:
        if self.target is not None and not self.fusion.runs_on(self.target):
            return program
        program = self.fusion(program, self.target).prepared()
        rules = self.fusion(program, self.target)
        groups = _merged(rules, range(len(program.equations)))
        kept = {
            i
            for members in groups.members.values()
            if len(members) > 1 and rules.saves([program.equations[i] for i in members])
            for i in members
        }
        if any(len(members) > 1 and kept.isdisjoint(members) for members in groups.members.values()):
            groups = _merged(rules, kept)  # without the others, more may fit together
        program = groups.rewritten(rules.fused, anchor=min if rules.early else max)
        alone = {e for e in program.equations if rules.alone(e, program.readers.get(e.outputs[0], ()))}
        equations = (rules.fused([e], e.outputs) if e in alone else e for e in program.equations)
        return replace(program, equations=tuple(equations)) if alone else program


def _merged(rules: Fusion, allowed: Collection[int]) -> Groups:
    """Groups of the equations at the ``allowed`` positions."""
    groups = Groups(rules.program, rules.limit)
    edges = [
        (p, i, v)
        for i in sorted(allowed)
        for v in dict.fromkeys(groups.equations[i].inputs)
        if (p := groups.producer.get(v)) is not None and p in allowed
    ]
    if not rules.in_order:
        edges.sort(key=lambda edge: -edge[2].nbytes)
    merged = True
    while merged:  # a merge may permit another one
        merged = False
        for p, i, v in edges:
            a, b = groups.of[p], groups.of[i]
            if a != b and rules.joins(groups, p, i, v) and groups.can_merge(a, b):
                groups.merge(a, b)
                merged = True
    for positions in rules.together(groups):
        _merge_independent(groups, positions)
    return groups


def _merge_independent(groups: Groups, positions: Iterable[int]) -> None:
    """Merge independent equations in their order. One that depends on the others begins another group."""
    first: int | None = None
    for i in positions:
        if first is not None and independent(groups, groups.of[first], groups.of[i]):
            groups.merge(groups.of[first], groups.of[i])
        else:
            first = i


def independent(groups: Groups, a: int, b: int) -> bool:
    """Whether two groups do not depend on each other, and can be merged."""
    return not (a in groups.producers(b) or b in groups.producers(a)) and groups.can_merge(a, b)


def with_copies(program: Program, copied: Callable[[Equation, Equation], bool]) -> Program:
    """``program`` with a copy of an equation for each reader for which ``copied(equation, reader)`` is true.

    So a cheap equation can be computed by the kernels of its readers, and its result need not be stored.
    """
    producer = {v: e for e in program.equations for v in e.outputs}
    equations: list[Equation] = []
    originals: set[Equation] = set()
    for e in program.equations:
        found = {v: producer[v] for v in dict.fromkeys(e.inputs) if v in producer and copied(producer[v], e)}
        originals.update(found.values())
        copies = {v: v.like() for v in found}
        equations += [replace(x, outputs=(copies[v],), scope=e.scope, phase=e.phase) for v, x in found.items()]
        equations.append(renamed(e, copies) if copies else e)
    read = {*program.outputs, *(v for e in equations for v in e.inputs)}
    return replace(
        program, equations=tuple(e for e in equations if e not in originals or not read.isdisjoint(e.outputs))
    )
