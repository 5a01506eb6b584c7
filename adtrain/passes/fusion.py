"""The fusion pass: equations that a form can compute together become one equation of the form.

A form is a kind of kernel; see `adtrain.core.program`. Its `Fusion` says which equations may share a kernel. This pass
copies cheap equations for their readers, merges groups, keeps them free of dependence cycles, and replaces each group
by one equation. Forms of one pass compete for the equations.

Here are the fusions of elementwise equations, which become one loop nest, and of a matrix product with its epilogue:
the bias and activation of a linear layer, the activation's mask on the input gradient, and the update of a weight from
its gradient. The product itself is never written to memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

from adtrain.core.kernel import Target
from adtrain.core.primitive import Trait
from adtrain.core.program import GATHER, LOOPS, PRODUCT, Equation, Program, Variable, fuse, renamed
from adtrain.core.staging import Results
from adtrain.core.types import Shape
from adtrain.passes.groups import MAX_EQUATIONS, Groups


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
        return self.program if type(self).copied is Fusion.copied else with_copies(self.program, self.copied)

    def copied(self, producer: Equation, reader: Equation) -> bool:
        """Whether ``reader`` gets a copy of ``producer``, whose results it reads, to compute them itself."""
        return False

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        """Whether the groups of two equations become one. ``reader`` reads ``value``, which ``producer`` computes."""
        return False

    def weight(self, producer: Equation) -> float:
        """The weight of a merge. If merges save equally many bytes, the one with the greatest weight comes first."""
        return 0

    def together(self, groups: Groups) -> Iterable[Iterable[int]]:
        """Lists of independent equations. Those of a list share a kernel."""
        return ()

    def saves(self, equations: Sequence[Equation]) -> bool:
        """Whether one kernel for the equations of a group saves time. Otherwise they stay as they are."""
        return True

    def declined(self) -> str | None:
        """Why a Program that is nearly one of the form's kernels is not; None for other Programs. People read it."""
        return None

    def largest_group(self) -> Sequence[Equation]:
        """The largest group of equations that may share a kernel, whether it saves time or not."""
        groups = _merged(self, range(len(self.program.equations)))
        return [groups.equations[i] for i in max(groups.members.values(), key=len)]

    def overhead(self, equations: Sequence[Equation]) -> float:
        """The time of a kernel in addition to that of moving its arguments and results, in launches.

        It is less where the kernel computes faster than the kernels of the single equations.
        """
        return 1

    def alone(self, equation: Equation, readers: Sequence[Equation]) -> bool:
        """Whether an equation that shares no kernel becomes an equation of the form, too; ``readers`` read it."""
        return False

    def fused(self, equations: Sequence[Equation], needed: Sequence[Variable]) -> Equation:
        """The equation of a group; ``needed`` are its results that other equations read."""
        return fuse(self.form, equations, needed)

    @cached_property
    def outputs(self) -> frozenset[Variable]:
        """The outputs of the Program."""
        return frozenset(self.program.outputs)

    @cached_property
    def unread(self) -> Sequence[int]:
        """The positions of the equations whose results no other equation reads."""
        return [i for i, e in enumerate(self.program.equations) if self.program.readers.keys().isdisjoint(e.outputs)]

    @cached_property
    def readers(self) -> Counter[Variable]:
        """The number of equations that read each variable. An output of the Program counts once more."""
        read = (v for e in self.program.equations for v in dict.fromkeys(e.inputs))
        return Counter((*self.program.outputs, *read))


_OF_USERS: dict[str, list[type[Fusion]]] = {"cpu": [], "cuda": []}


def register_fusion(fusion: type[Fusion], backend: str) -> None:
    """Let ``backend`` fuse equations to those of a form of the user. It comes before the device's own forms, after the
    fusion of elementwise equations. The kernels of the form are registered under its name; see `core.kernel.register`.

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
    """The pass for one form, or for several that compete for equations.

    Each form proposes groups of equations. If two groups have common equations, one group keeps them, and the other one
    is left with the rest. Of the two choices the pass takes the one with which both groups together save more. If the
    sums are equal, the group of the form that is earlier in `fusions` keeps them. Then the forms that lost equations
    propose again.

    Attributes:
        fusions: the fusions of the forms.
        target: the GPU; None for the CPU.
        launch_bytes: the bytes that memory moves in the time of a launch.
        name: the name of a pass for several forms.
    """

    results: ClassVar = Results.EXACT
    """The body of a fused equation has the equations that it replaces."""
    fusions: tuple[type[Fusion], ...]
    target: Target | None = None
    launch_bytes: int = 0
    name: str = ""

    @property
    def __name__(self) -> str:
        return self.name or f"fuse_{self.fusions[0].form}"

    def __call__(self, program: Program) -> Program:
        able = [f for f in self.fusions if self.target is None or f.runs_on(self.target)]
        proposing = able
        while proposing:
            for fusion in proposing:
                program = fusion(program, self.target).prepared()
            program, proposing = self._round(program, [fusion(program, self.target) for fusion in proposing])
        for each in able:
            program = _with_alone(program, each(program, self.target))
        return program

    def _round(self, program: Program, fusions: Sequence[Fusion]) -> tuple[Program, list[type[Fusion]]]:
        """The Program with one equation for each group that keeps its equations, and the forms that lost equations."""
        proposed = [_proposed(each) for each in fusions]
        proposals = [
            _Proposal(i, frozenset(members))
            for i, found in enumerate(proposed)
            for members in found.members.values()
            if len(members) > 1
        ]
        groups = Groups(program) if len(fusions) > 1 else proposed[0]
        by: dict[Equation, Fusion] = {}
        for proposal in _winners(proposals, _Costs(program, fusions, self.launch_bytes)):
            if len(fusions) > 1 and not groups.merge_all(sorted(proposal.members)):
                continue
            by |= dict.fromkeys((program.equations[i] for i in proposal.members), fusions[proposal.form])

        def fused(equations: Sequence[Equation], needed: Sequence[Variable]) -> Equation:
            return by[equations[0]].fused(equations, needed)

        def anchor(members: Sequence[int]) -> int:
            form = by.get(program.equations[members[0]])
            return min(members) if form is not None and form.early else max(members)

        lost = {x.form for x in proposals if len({groups.of[i] for i in x.members}) > 1}
        program = groups.rewritten(fused, anchor)
        return program, [type(fusions[i]) for i in sorted(lost)]


def declined(passes: Sequence[Callable[[Program], Program]], programs: Sequence[Program]) -> list[str]:
    """Why forms that nearly apply are not used, a sentence for each.

    Args:
        programs: the Program before each pass, and after the last one.
    """
    used = {e.form for x in programs for e in x.equations}
    found = []
    for each, before in zip(passes, programs, strict=False):
        if not isinstance(each, FusionPass):
            continue
        for fusion in each.fusions:
            if fusion.form not in used and (reason := fusion(before, each.target).declined()) is not None:
                found.append(f"The fusion {fusion.form} nearly applies: {reason}.")
    return found


def _with_alone(program: Program, fusion: Fusion) -> Program:
    """The Program in which single equations that are worth it are equations of the form."""
    if type(fusion).alone is Fusion.alone:
        return program
    alone = {e for e in program.equations if fusion.alone(e, program.readers.get(e.outputs[0], ()))}
    if not alone:
        return program
    equations = (fusion.fused([e], e.outputs) if e in alone else e for e in program.equations)
    return replace(program, equations=tuple(equations))


class _Proposal(NamedTuple):
    """A group of equations: the number of a form, and the positions of the equations."""

    form: int
    members: frozenset[int]


def _proposed(fusion: Fusion) -> Groups:
    """The groups that a form proposes."""
    equations = fusion.program.equations
    groups = _merged(fusion, range(len(equations)))
    found = [members for members in groups.members.values() if len(members) > 1]
    kept = [members for members in found if fusion.saves([equations[i] for i in members])]
    if len(kept) < len(found):
        groups = _merged(fusion, {i for members in kept for i in members})  # without the others, more may merge
    return groups


def _winners(proposals: Sequence[_Proposal], costs: _Costs) -> Iterator[_Proposal]:
    """The proposals that keep all of their equations.

    A proposal that loses equations is left out, but competes for its other equations, which its form may propose again.
    """

    def saved(first: _Proposal, second: _Proposal) -> float:
        """What both save if the first has their common equations."""
        return costs.saved(first) + max(0, costs.saved(_Proposal(second.form, second.members - first.members)))

    def beats(a: _Proposal, b: _Proposal) -> bool:
        return (saved(a, b), b.form) > (saved(b, a), a.form)

    whole, left = set(proposals), list(proposals)
    while left:
        of: dict[int, list[_Proposal]] = {}
        for x in left:
            for i in x.members:
                of.setdefault(i, []).append(x)
        rivals = {x: {other for i in x.members for other in of[i]} - {x} for x in left}
        unbeaten = [x for x in left if not any(beats(other, x) for other in rivals[x])]
        best = unbeaten or [max(left, key=costs.saved)]
        yield from (x for x in best if x in whole)
        gone = frozenset[int]().union(*(x.members for x in best))
        rest = (_Proposal(x.form, x.members - gone) for x in left)
        left = [x for x in rest if len(x.members) > 1]


class _Costs:
    """The times of kernels, as the bytes that memory moves in them.

    A kernel takes the time in which memory moves its arguments and results, and the overhead of its form
    (`Fusion.overhead`). The overhead of a kernel of one equation is a launch. Copies for readers are equations, so what
    is computed twice counts twice.
    """

    def __init__(self, program: Program, fusions: Sequence[Fusion], launch_bytes: int) -> None:
        self.equations, self.fusions, self.launch_bytes = program.equations, fusions, launch_bytes
        self.outputs = program.outputs
        self.known: dict[_Proposal, float] = {}

    @cached_property
    def source(self) -> Mapping[Variable, Variable]:
        """For each view, the variable whose memory it shares."""
        found: dict[Variable, Variable] = {}
        for e in self.equations:
            if e.primitive.view:
                found |= {v: found.get(x, x) for x in e.inputs for v in e.outputs}
        return found

    @cached_property
    def readers(self) -> Mapping[Variable, set[int]]:
        """The positions of the equations that read each variable or a view of it; -1 for the Program's outputs."""
        found: dict[Variable, set[int]] = {}
        read = [(v, i) for i, e in enumerate(self.equations) if not e.primitive.view for v in e.inputs]
        for v, i in (*read, *((v, -1) for v in self.outputs)):
            found.setdefault(self.source.get(v, v), set()).add(i)
        return found

    def saved(self, proposal: _Proposal) -> float:
        """What one kernel of the form saves over a kernel for each equation."""
        found = self.known.get(proposal)
        if found is None:
            overhead = self.fusions[proposal.form].overhead([self.equations[i] for i in proposal.members])
            one = self._moved(proposal.members) + overhead * self.launch_bytes if proposal.members else 0
            alone = (self.equations[i] for i in proposal.members if not self.equations[i].primitive.view)
            found = self.known[proposal] = sum(e.cost.bytes + self.launch_bytes for e in alone) - one
        return found

    def _moved(self, members: Collection[int]) -> int:
        """The bytes that a kernel for the equations reads and writes."""
        made: set[Variable] = set()
        read: dict[Variable, int] = {}
        for i in members:
            if not self.equations[i].primitive.view:
                made.update(self.equations[i].outputs)
                for x, n in zip(self.equations[i].inputs, self.equations[i].elements_read, strict=True):
                    v = self.source.get(x, x)
                    read[v] = min(read.get(v, 0) + n, v.size)
        moved = sum(n * v.type.dtype.itemsize for v, n in read.items() if v not in made)
        return moved + sum(v.nbytes for v in made if not self.readers.get(v, set()).issubset(members))


def _merged(fusion: Fusion, allowed: Collection[int]) -> Groups:
    """Groups of the equations at the ``allowed`` positions."""
    groups = Groups(fusion.program, fusion.limit)
    edges = [
        (p, i, v)
        for i in sorted(allowed)
        for v in dict.fromkeys(groups.equations[i].inputs)
        if (p := groups.producer.get(v)) is not None and p in allowed
    ]
    if not fusion.in_order:
        edges.sort(key=lambda edge: (-edge[2].nbytes, -fusion.weight(groups.equations[edge[0]])))
    merged = True
    while merged:  # a merge may permit another one
        merged = False
        for p, i, v in edges:
            a, b = groups.of[p], groups.of[i]
            if a != b and fusion.joins(groups, p, i, v) and groups.can_merge(a, b):
                groups.merge(a, b)
                merged = True
    for positions in fusion.together(groups):
        _merge_independent(groups, (i for i in positions if i in allowed))
    return groups


def _merge_independent(groups: Groups, positions: Iterable[int]) -> None:
    """Merge independent equations in their order. One that depends on the others begins another group."""
    first: int | None = None
    for i in positions:
        if first is None or not groups.merge_independent(first, i):
            first = i


def with_copies(program: Program, copied: Callable[[Equation, Equation], bool]) -> Program:
    """``program`` with a copy of an equation for each reader for which ``copied(equation, reader)`` is true.

    So a cheap equation can be computed by the kernels of its readers, and its result need not be stored.
    """
    producer = program.producer
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


def with_shared_views(program: Program, share: Callable[[Equation], bool]) -> Program:
    """``program`` in which the equations that ``share`` read the first of their equal reshapes.

    Those that read two equal ones keep them: the inputs of a fused equation are distinct.
    """
    sharing = {e for e in program.equations if share(e)}
    shared = {v for e in sharing for v in e.inputs}
    first: dict[Variable, Variable] = {}
    known: dict[tuple[Variable, Shape], Variable] = {}
    equations = []
    for e in program.equations:
        if e.has(Trait.RESHAPE) and shared.issuperset(e.outputs):
            (x,), (y,) = e.inputs, e.outputs
            first[y] = known.setdefault((x, y.type.shape), y)
        names = {v: first[v] for v in e.inputs if v in first} if e in sharing else {}
        equations.append(renamed(e, names) if len(set(names.values())) == len(names) else e)
    return replace(program, equations=tuple(equations))


def elementwise(equation: Equation) -> bool:
    """Whether an equation is a C expression of the elements of its arguments, or a broadcast of them."""
    return equation.primitive.expression is not None or equation.has(Trait.BROADCAST)


def by_element(equation: Equation) -> bool:
    """Whether it computes element by element: one elementwise operation, or a loop of several."""
    return equation.form == LOOPS or elementwise(equation)


def is_loops(equation: Equation) -> bool:
    """Whether generated loops compute it: it is by element, or reads rows of tables by index."""
    return equation.form in (LOOPS, GATHER) or elementwise(equation)


def reads_by_element(equation: Equation, v: Variable) -> bool:
    """Whether each element of the elementwise result needs only the same element of `v`."""
    if equation.outputs[0].type.shape != v.type.shape:
        return False
    if equation.form != LOOPS:
        return not equation.has(Trait.BROADCAST)
    body: Program = equation.params["body"]
    inner = body.inputs[equation.inputs.index(v)]
    return all(inner not in e.inputs or not e.has(Trait.BROADCAST) for e in body.equations)


def sum_of_squares(program: Program, e: Equation) -> Equation | None:
    """The equation that sums the squares of an example, if `e` squares, and nothing else reads the squares."""
    if not (e.primitive.name == "square" or (e.primitive.name == "mul" and e.inputs[0] is e.inputs[1])):
        return None
    (out,) = e.outputs
    examples = out.type.shape[0]
    while out not in program.outputs and len(readers := program.readers.get(out, ())) == 1:
        (reader,) = readers
        if reader.primitive.name == "sum" and reader.params["axes"] == tuple(range(1, len(out.type.shape))):
            return reader
        if reader.primitive.name != "reshape" or reader.outputs[0].type.shape[:1] != (examples,):
            return None
        (out,) = reader.outputs
    return None


class ElementwiseFusion(Fusion):
    """One loop nest for each connected group of elementwise equations of one shape and phase.

    Each reader of a broadcast computes it, so that no broadcast is stored for several readers.

    Attributes:
        across_phases: whether equations of different phases may join, too.
    """

    form = LOOPS
    limit = MAX_EQUATIONS
    across_phases: ClassVar[bool] = False

    def copied(self, producer: Equation, reader: Equation) -> bool:
        return producer.has(Trait.BROADCAST) and elementwise(reader) and not reader.has(Trait.BROADCAST)

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        source, e = groups.equations[producer], groups.equations[reader]
        alike = source.outputs[0].type.shape == e.outputs[0].type.shape
        together = alike and (self.across_phases or source.phase == e.phase)
        return elementwise(source) and elementwise(e) and not e.has(Trait.WIDENING) and together


fuse_loops = FusionPass((ElementwiseFusion,))


class EpilogueFusion(Fusion):
    """A product or convolution and the elementwise equation that reads it: its epilogue."""

    early = True

    def takes(self, product: Equation, epilogue: Equation) -> bool:
        """Whether a kernel of ``product`` can compute ``epilogue``."""
        raise NotImplementedError

    def weight(self, producer: Equation) -> float:
        """Where a sum of two products can join either one, it joins the longer one, which hides more of its traffic."""
        return producer.cost.flops

    def joins(self, groups: Groups, producer: int, reader: int, value: Variable) -> bool:
        product, e = groups.equations[producer], groups.equations[reader]
        alone = all(len(groups.members[groups.of[i]]) == 1 for i in (producer, reader))
        return alone and by_element(e) and self.takes(product, e) and reads_by_element(e, value)


class ProductFusion(EpilogueFusion):
    """A matrix product with an epilogue."""

    form = PRODUCT

    def takes(self, product: Equation, epilogue: Equation) -> bool:
        """On the CPU a batch may have one axis. An epilogue counts rows and columns in 32 bits."""
        c = product.outputs[0]
        if not product.has(Trait.MATMUL) or max(c.type.shape[-2:]) >= 2**31:
            return False
        return len(c.type.shape) <= 3 or c.device != "cpu"


fuse_product = FusionPass((ProductFusion,))
