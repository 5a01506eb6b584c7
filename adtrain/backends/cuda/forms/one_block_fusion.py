"""One-block fusion: small equations that depend on one another run in one thread block, without launches in between.

Examples: the sum of the loss, the count of correct answers, schedules, the optimizer's scalars, the gradients of small
biases and their updates.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from adtrain.core.fused import ONE_BLOCK, fuse, renamed
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.passes.fuse_elementwise import by_element
from adtrain.passes.groups import MAX_EQUATIONS, Groups

BY_INDEX = frozenset(("take", "take_along_axis", "scatter_along_axis", "one_hot"))
FORMS = BY_INDEX | {"sum", "max", "min", "softmax", "log_softmax", "argmax", "concatenate", "transpose", "slice"}
"""The primitives that the generator of one-block kernels has code for, besides elementwise ones and reshapes."""

MAX_STEPS = 8 << 10
"""Maximum steps of a small equation: elements that are visited one after another. On an H200 a launch costs about 2 us,
as much as 8 elements for each of 1024 threads if the threads wait for every element."""
LOADS_IN_FLIGHT, VECTOR = 4, 4
"""Elements of a sum that a thread loads at once: of one sum, or of neighbouring sums."""


def fuse_one_block(program: Program) -> Program:
    """One `one_block` equation for each connected group of small equations between the same large ones."""
    program, copies = _copy_reshapes(program)
    depth = depths(program)
    joins = [is_small(e) or not copies.isdisjoint(e.outputs) for e in program.equations]
    groups = Groups(program, MAX_EQUATIONS)
    for i, e in enumerate(program.equations):
        for v in e.inputs:
            p = groups.producer.get(v)
            if p is None or depth[p] != depth[i] or not (joins[p] and joins[i]):
                continue
            if groups.can_merge(groups.of[p], groups.of[i]):
                groups.merge(groups.of[p], groups.of[i])
    return groups.rewritten(partial(fuse, ONE_BLOCK))


def _copy_reshapes(program: Program) -> tuple[Program, set[Variable]]:
    """Give each small reader of a reshape between small equations a reshape of its own; the outputs of the copies."""
    depth = dict(zip(program.equations, depths(program), strict=True))
    producer = {v: e for e in program.equations for v in e.outputs}
    equations: list[Equation] = []
    copied: set[Variable] = set()
    needed = set(program.outputs)
    for e in program.equations:
        copies: dict[Variable, Variable] = {}
        for v in dict.fromkeys(e.inputs) if is_small(e) else ():
            view = producer.get(v)
            source = producer.get(view.inputs[0]) if view is not None and view.has(Trait.RESHAPE) else None
            if view is not None and source is not None and is_small(source) and depth[source] == depth[e]:
                copies[v] = Variable(v.type, v.device)
                equations.append(replace(view, outputs=(copies[v],)))
        copied.update(copies.values())
        equations.append(renamed(e, copies) if copies else e)
        needed.update(equations[-1].inputs)
    used = tuple(e for e in equations if not e.has(Trait.RESHAPE) or not needed.isdisjoint(e.outputs))
    return replace(program, equations=used), copied


def is_small(equation: Equation) -> bool:
    """Whether one thread block computes it in less time than a launch takes."""
    e = equation
    if not by_element(e) and e.primitive.name not in FORMS:
        return False
    if not all(v.size for v in (*e.inputs, *e.outputs)):
        return False
    return _steps(e) <= MAX_STEPS


def _steps(equation: Equation) -> int:
    """The number of elements that are visited one after another."""
    e = equation
    size, shape = e.inputs[0].size if e.inputs else 0, e.inputs[0].type.shape if e.inputs else ()
    if e.has(Trait.REDUCTION):
        last = max((i for i, n in enumerate(shape) if n > 1), default=0)
        return size // LOADS_IN_FLIGHT // (1 if last in e.params["axes"] else VECTOR)
    if e.primitive.name == "argmax":
        return size
    if e.primitive.name == "scatter_along_axis":
        return e.outputs[0].size * shape[e.params["axis"]]
    return e.outputs[0].size


def depths(program: Program) -> list[int]:
    """For each equation the minimum number of launches before it. Small and `one_block` equations do not count."""
    after: dict[Variable, int] = {}
    found = []
    for e in program.equations:
        found.append(max((after.get(v, 0) for v in e.inputs), default=0))
        launch = not (is_small(e) or e.has(Trait.RESHAPE) or e.form == ONE_BLOCK)
        after |= dict.fromkeys(e.outputs, found[-1] + launch)
    return found
