"""Block fusion: small equations that hand results to one another run in one thread block, without launches in between.

The loss and its gradient, what counts correct answers, schedules and the optimizer's numbers, the gradients of small
biases and their updates.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from adtrain.core.fused import FUSED, block_p, fuse, loops_p
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.fuse_elementwise import elementwise
from adtrain.passes.groups import Groups

REDUCTIONS = frozenset(("sum", "max", "min"))
BY_INDEX = frozenset(("take", "take_along_axis", "scatter_along_axis", "one_hot"))
FORMS = REDUCTIONS | BY_INDEX | {"softmax", "log_softmax", "argmax", "concatenate", "transpose", "slice"}
"""The primitives that a thread block computes by itself, beside elementwise ones and reshapes."""

MOST = 8 << 10
"""Elements that a small equation goes through, at most. A launch costs about 2 microseconds on an H200, and so do 8
elements a thread of a block of 1024, each waiting for its arguments."""
OVERLAP, VECTOR = 4, 4
"""Elements of a sum that a thread waits for at once, and that it reads at once where neighbours belong to others."""


def fuse_blocks(program: Program) -> Program:
    """One `block` equation for each connected group of small equations between the same large ones."""
    program, own = _own_reshapes(program)
    depth = depths(program)
    joins = [is_small(e) or not own.isdisjoint(e.outputs) for e in program.equations]
    groups = Groups(program)
    for i, e in enumerate(program.equations):
        for v in e.inputs:
            p = groups.producer.get(v)
            if p is None or depth[p] != depth[i] or not (joins[p] and joins[i]):
                continue
            if groups.can_merge(groups.of[p], groups.of[i]):
                groups.merge(groups.of[p], groups.of[i])
    return groups.rewritten(partial(fuse, block_p))


def _own_reshapes(program: Program) -> tuple[Program, set[Variable]]:
    """Reshapes between small equations, for each reader one of its own, so that it can join them; the copies."""
    depth = dict(zip(program.equations, depths(program), strict=True))
    producer = {v: e for e in program.equations for v in e.outputs}
    equations: list[Equation] = []
    own: set[Variable] = set()
    needed = set(program.outputs)
    for e in program.equations:
        copies: dict[Variable, Variable] = {}
        for v in dict.fromkeys(e.inputs) if is_small(e) else ():
            view = producer.get(v)
            source = producer.get(view.inputs[0]) if view is not None and view.primitive.name == "reshape" else None
            if view is not None and source is not None and is_small(source) and depth[source] == depth[e]:
                copies[v] = Variable(v.type, v.device)
                equations.append(replace(view, outputs=(copies[v],)))
        own.update(copies.values())
        equations.append(renamed(e, copies) if copies else e)
        needed.update(equations[-1].inputs)
    kept = tuple(e for e in equations if e.primitive.name != "reshape" or not needed.isdisjoint(e.outputs))
    return replace(program, equations=kept), own


def renamed(equation: Equation, names: dict[Variable, Variable]) -> Equation:
    """`equation` with other variables in place of some; a body names its inputs and outputs as the equation does."""
    params = dict(equation.params)
    if equation.primitive in FUSED:
        body: Program = params["body"]
        inputs, outputs = (tuple(names.get(v, v) for v in those) for those in (body.inputs, body.outputs))
        equations = tuple(renamed(e, names) for e in body.equations)
        params["body"] = replace(body, inputs=inputs, outputs=outputs, equations=equations)
    inputs, outputs = (tuple(names.get(v, v) for v in those) for those in (equation.inputs, equation.outputs))
    return replace(equation, inputs=inputs, outputs=outputs, params=params)


def is_small(equation: Equation) -> bool:
    """Whether one thread block computes it in less time than a launch takes."""
    e = equation
    if e.primitive is not loops_p and not elementwise(e) and e.primitive.name not in FORMS:
        return False
    if not all(v.size for v in (*e.inputs, *e.outputs)):
        return False
    return _turns(e) <= MOST


def _turns(equation: Equation) -> int:
    """The elements that threads go through one after the other."""
    e, name = equation, equation.primitive.name
    size, shape = e.inputs[0].size if e.inputs else 0, e.inputs[0].type.shape if e.inputs else ()
    if name in REDUCTIONS:
        last = max((i for i, n in enumerate(shape) if n > 1), default=0)
        return size // OVERLAP // (1 if last in e.params["axes"] else VECTOR)
    if name == "argmax":
        return size
    if name == "scatter_along_axis":
        return e.outputs[0].size * shape[e.params["axis"]]
    return e.outputs[0].size


def depths(program: Program) -> list[int]:
    """For each equation how many launches there are, at least, in front of it. Small ones and blocks are none."""
    after: dict[Variable, int] = {}
    found = []
    for e in program.equations:
        found.append(max((after.get(v, 0) for v in e.inputs), default=0))
        launch = not (is_small(e) or e.primitive.name == "reshape" or e.primitive is block_p)
        after |= dict.fromkeys(e.outputs, found[-1] + launch)
    return found
