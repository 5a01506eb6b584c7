"""Batch prefetch: in repeated steps, the last launch of a step also gathers the batch of the next step.

The loops or the epilogue that update a weight also write the bfloat16 copy of it that the next step reads.

This is software pipelining with one stage (Allan, Jones, Lee and Allan, "Software Pipelining", ACM Computing Surveys
27, 1995). The terms prologue, steady state and epilogue are theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from adtrain.backends.cuda.codegen.loops import GROUPED_BFLOAT16
from adtrain.backends.cuda.forms.horizontal import MAX_POINTERS, HorizontalFusion, blocks_in_launch
from adtrain.backends.cuda.forms.peer_exchanges import PEER_EXCHANGES
from adtrain.backends.cuda.forms.streamed_layer import streamed_equations, update_and_product
from adtrain.core.kernel import Target
from adtrain.core.program import (
    HORIZONTAL,
    LOOPS,
    PRODUCT,
    Equation,
    Program,
    Variable,
    arguments_of,
    body_of,
    fuse,
    launched_together,
    renamed,
)
from adtrain.passes.fusion import FusionPass, by_element, is_loops
from adtrain.passes.order import exchanges_data, readers_first


@dataclass(frozen=True)
class PrefetchedRuns:
    """A Program divided for several runs: ``prologue`` once, ``steady`` for each run but the last, ``epilogue`` once.

    Attributes:
        prologue: the equations that gather the first batch and copy the first weights. Their results are inputs of the
            other two, after the Program's own inputs.
        steady: the rest of a run, and the same for the next run, whose results are further outputs. None if nothing is
            prefetched.
        epilogue: the rest of the last run.
    """

    prologue: Sequence[Equation]
    steady: Program | None
    epilogue: Program


def prefetch_batch(program: Program, target: Target) -> PrefetchedRuns:
    """Divide a fused Program so that each run prefetches for the next one, if that saves a launch.

    Equations can be prefetched if their arguments are known when a run has begun: inputs, or values for the next run
    that depend on inputs only, such as a step counter. A Program without horizontal fusion and without such copies of
    weights is not divided. Neither is a Program in which products would share other launches than before: other kernels
    would compute them, and all runs must return the same bits.

    In a Program with exchanges the launches that gather follow the last exchange. Kernels of products and sums before
    that exchange stay as they are.
    """
    undivided = PrefetchedRuns((), None, program)
    if streamed := streamed_equations(program):
        return _prefetch_product(program, *streamed) or undivided
    exchanges = [i for i, e in enumerate(program.equations) if exchanges_data(e)]
    if program.members or not program.carries:
        return undivided
    next_value = dict(zip(program.donated_inputs, program.outputs, strict=True))
    updating = (e for e in _launched(program.equations) if e.form in (PRODUCT, GROUPED_BFLOAT16) or by_element(e))
    updated = {v for e in updating for v in e.outputs}
    # The bfloat16 copies of weights that loops or the epilogue of a product have updated.
    bits = (e for e in program.equations if e.primitive.name == "to_bfloat16")
    copies = [e for e in bits if next_value.get(e.inputs[0]) in updated]
    if not copies and not any(e.form == HORIZONTAL for e in program.equations):
        return undivided
    known, results = {*program.inputs, *program.constants}, set(program.outputs)
    early = known | {v for e in _launched(program.equations) if known.issuperset(e.inputs) for v in e.outputs}

    def can_prefetch(e: Equation) -> bool:
        ready = known.issuperset(e.inputs) and early.issuperset(next_value.get(v, v) for v in e.inputs)
        return ready and not e.is_view and results.isdisjoint(e.outputs)

    prologue = []
    for e in program.equations:
        if can_prefetch(e):
            prologue.append(e)
            if exchanges:  # a launch that depends on a prefetched value overlaps an exchange, too
                known.update(e.outputs)
                early.update(e.outputs)
    if copies:  # where the next batch cannot be prefetched, the copies can
        return _divided(program, prologue, copies, target) or _divided(program, [], copies, target) or undivided
    return (_divided(program, prologue, copies, target) if prologue else None) or undivided


def _divided(
    program: Program, prologue: Sequence[Equation], copies: Sequence[Equation], target: Target
) -> PrefetchedRuns | None:
    """The runs that prefetch the results of a prologue and of copies of weights; see `prefetch_batch`."""
    exchanges = any(map(exchanges_data, program.equations))
    next_value = dict(zip(program.donated_inputs, program.outputs, strict=True))
    fetching = {*prologue, *copies}
    rest = [e for e in program.equations if e not in fetching]
    fetched = tuple(v for e in (*prologue, *copies) for v in e.outputs)
    inputs = (*program.inputs, *fetched)
    ahead = {v: v.like() for v in fetched}
    following = [renamed(e, next_value | ahead) for e in _launched(prologue)]
    added = {e.inputs[0]: e for e in (renamed(e, next_value | ahead) for e in copies)}
    copying = [_with_copies(e, added) for e in rest]
    steady = Program(
        inputs,
        program.constants,
        (*copying, *following) if exchanges or not prologue else (*_launched(copying), *following),
        (*program.outputs, *ahead.values()),
        program.donated | set(fetched),
    )
    if exchanges:
        steady = _after_exchanges(steady, {v for e in following for v in e.inputs}, target)
    elif prologue:
        steady = readers_first(FusionPass((HorizontalFusion,), target)(steady))
    new = frozenset(ahead.values())
    saves = exchanges or _launches(steady) < _launches(program)
    if not saves or _shared(steady.equations, new) != _shared(rest, new):
        return None
    return PrefetchedRuns((*prologue, *copies), steady, replace(program, inputs=inputs, equations=tuple(rest)))


def _with_copies(e: Equation, copies: Mapping[Variable, Equation]) -> Equation:
    """`e`. Where its loops or epilogues compute a key of ``copies``, they compute the copy too."""
    found = [copies[v] for v in e.outputs if v in copies]
    if not found:
        return e
    needed = {*e.outputs, *(v for copy in found for v in copy.outputs)}
    if e.form in (HORIZONTAL, GROUPED_BFLOAT16):
        return fuse(e.form, [_with_copies(x, copies) for x in body_of(e).equations], needed)
    *product, update = body_of(e).equations if e.form == PRODUCT else (e,)
    loops = fuse(LOOPS, [*body_of(update).equations, *found], needed)
    return fuse(e.form, [*product, loops], needed) if product else loops


def _prefetch_product(program: Program, product: Equation, update: Equation) -> PrefetchedRuns | None:
    """The runs of a Program whose first layer is streamed: the update of a run also computes the next run's product.

    None if another equation reads the new weights, or if the product reads more than inputs.
    """
    known = {*program.inputs, *program.constants}
    read = {v for e in program.equations for v in e.inputs}
    if not known.issuperset(product.inputs) or not read.isdisjoint(update.outputs):
        return None
    next_value = dict(zip(program.donated_inputs, program.outputs, strict=True))
    (result,) = product.outputs
    following = result.like()
    rest = tuple(e for e in program.equations if e is not product)
    inputs = (*program.inputs, result)
    steady = Program(
        inputs,
        program.constants,
        (*(e for e in rest if e is not update), update_and_product(update, product, next_value, following)),
        (*program.outputs, following),
        program.donated | {result},
    )
    return PrefetchedRuns([product], steady, replace(program, inputs=inputs, equations=rest))


def _after_exchanges(program: Program, needed: set[Variable], target: Target) -> Program:
    """The Program with horizontal fusion of the equations after the last exchange.

    Equations among them that compute `needed` values, such as a step counter or the indices of a batch, move into the
    first horizontal launch before which their inputs are known, if it has room for them. What does not depend on the
    exchange moves into its launch, if it is fused with updates.
    """
    last = max(i for i, e in enumerate(program.equations) if exchanges_data(e))
    head, tail = list(program.equations[: last + 1]), _launched(program.equations[last + 1 :])
    known = {*program.inputs, *program.constants}
    for i, e in enumerate(head):
        updates = e.form == PEER_EXCHANGES
        wanted = [x for x in tail if (not x.is_view if updates else not needed.isdisjoint(x.outputs))]
        early = [x for x in wanted if known.issuperset(x.inputs)]
        operands = {v for x in (e, *early) for v in (*x.inputs, *x.outputs)}
        fits = all(map(blocks_in_launch, early)) and len(operands) <= MAX_POINTERS
        if (updates or e.form == HORIZONTAL) and early and fits:
            together = [*e.params["body"].equations, *early]
            head[i] = fuse(e.form, together, {v for x in (e, *early) for v in x.outputs})
            tail = [x for x in tail if x not in early]
        known.update(head[i].outputs)
    fused = readers_first(FusionPass((HorizontalFusion,), target)(_subprogram(program, tail))).equations
    read = {v for e in fused if not e.is_view for v in e.inputs}
    for e in reversed(fused):
        read.update(e.inputs if e.is_view and not read.isdisjoint(e.outputs) else ())
    received = [e for e in fused if e.is_view and read.isdisjoint(e.outputs)]  # only the next run reads them
    return replace(program, equations=(*head, *(e for e in fused if e not in received), *received))


def _subprogram(program: Program, equations: Sequence[Equation]) -> Program:
    """A Program of some equations of ``program``. It returns what the others read."""
    chosen = set(equations)
    read = {v for e in program.equations if e not in chosen for v in e.inputs} | set(program.outputs)
    inputs = arguments_of(equations)
    constants = {v: x for v, x in program.constants.items() if v in inputs}
    outputs = tuple(v for e in equations for v in e.outputs if v in read)
    return Program(tuple(v for v in inputs if v not in constants), constants, tuple(equations), outputs)


def _launched(equations: Iterable[Equation]) -> list[Equation]:
    """The equations, with the independent equations in place of `horizontal` ones."""
    return [x for e in equations for x in launched_together(e)]


def _shared(equations: Sequence[Equation], ignored: frozenset[Variable]) -> set[tuple[bool, frozenset[Variable]]]:
    """For each launch: whether several equations share it, and its results, except those `ignored` and of loops."""
    launches = ((e, [v for x in launched_together(e) if not is_loops(x) for v in x.outputs]) for e in equations)
    found = ((e.form == HORIZONTAL, frozenset(results) - ignored) for e, results in launches)
    return {(shared, results) for shared, results in found if results}


def _launches(program: Program) -> int:
    return sum(not e.is_view for e in program.equations)
