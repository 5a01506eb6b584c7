"""Fuse all launches of a sweep's step, and several steps, into one launch, if the first layer can stay on chip.

A cluster of thread blocks computes several steps of one member. The weights of the first layer and their optimizer
state stay in shared memory (resident). So they are read from device memory once in a launch, not several times in each
step. The blocks divide the other equations by the units of the layer (`cluster_shards.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from adtrain.backends.cuda.forms.cluster_shards import cluster_shards
from adtrain.backends.cuda.forms.resident_layer import resident_layer
from adtrain.core.fused import HORIZONTAL, RESIDENT_STEPS, fused_p, per_member_p, renamed
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.core.target import Target
from adtrain.core.types import ArrayType

MIN_CAPABILITY = (9, 0)
"""The first compute capability with clusters."""


@keeps(Results.EXACT)
def fuse_resident_steps(program: Program, target: Target) -> Program:
    """The step of all members as one equation, if their first layer can stay on chip. Else the Program, unchanged."""
    step = None if target.capability < MIN_CAPABILITY else step_of_members(program)
    if step is None:
        return program
    body, names, count = step
    made = {v for e in body.equations if not e.has(Trait.RESHAPE) for v in e.outputs}
    layer = resident_layer(body) if made.issuperset(body.outputs) else None
    blocks = layer.blocks(target.shared) if layer else None
    if layer is None or blocks is None or cluster_shards(body, layer, blocks) is None:
        return program
    of_all = {w: v for v, w in names.items()}
    inputs, outputs = (tuple(of_all[v] for v in group) for group in (body.inputs, body.outputs))
    one = Equation(fused_p, body.inputs, {"form": RESIDENT_STEPS, "body": body}, body.outputs)
    params = {
        "body": Program(body.inputs, {}, (one,), body.outputs),
        "count": count,
        "mapped": tuple(names[v].type != v.type for v in inputs),
        "shared": sum(names[v].type == v.type for v in outputs),
    }
    scopes = dict.fromkeys(scope for e in program.equations for scope in e.scope.split("+") if scope)
    fused = Equation(per_member_p, inputs, params, outputs, "+".join(scopes), layer.backward.phase)
    return replace(program, equations=(fused,))


def step_of_members(program: Program) -> tuple[Program, Mapping[Variable, Variable], int] | None:
    """What `of_one_member` makes of a step that can repeat, and the number of members.

    None if the Program is no such step, or has an equation for all members other than `per_member`.
    """
    counts = {e.params["count"] for e in program.equations if e.primitive is per_member_p}
    distinct = len(set(program.outputs)) == len(program.outputs)
    if not program.carries or not distinct or len(counts) != 1:
        return None
    mapped = mapped_variables(program)
    if any(mapped[e.outputs[0]] and e.primitive is not per_member_p for e in program.equations if not e.is_view):
        return None
    return *of_one_member(program, mapped), counts.pop()


def mapped_variables(program: Program) -> dict[Variable, bool]:
    """For each variable, whether it has a value for each member, along axis 0."""
    mapped = dict.fromkeys((*program.inputs, *program.constants), False)
    for e in program.equations:
        if e.primitive is per_member_p:
            own = len(e.outputs) - e.params.get("shared", 0)
            mapped |= {v: True for v, flag in zip(e.inputs, e.params["mapped"], strict=True) if flag}
            mapped |= {v: i < own for i, v in enumerate(e.outputs)}
        else:
            mapped |= dict.fromkeys(e.outputs, any(mapped[v] for v in e.inputs))
    return mapped


def of_one_member(program: Program, mapped: Mapping[Variable, bool]) -> tuple[Program, Mapping[Variable, Variable]]:
    """The Program of one member, and for each variable of all members the variable of one.

    Horizontal equations are replaced by the equations in their bodies. Inputs that a step replaces come first, in the
    order of the outputs that replace them, as `resident_layer.carried` expects. Outputs that are the same for all
    members come last.
    """
    names = {v: Variable(_of_member(v.type) if flag else v.type, v.device) for v, flag in mapped.items()}
    equations: list[Equation] = []
    for e in program.equations:
        if e.primitive is per_member_p:
            body: Program = e.params["body"]
            inner = (*body.inputs, *body.outputs)
            own_names = dict(zip(inner, (names[v] for v in (*e.inputs, *e.outputs)), strict=True))
            found = [renamed(x, own_names) for x in body.equations]
        else:
            own = renamed(e, names)
            shape = {"shape": own.outputs[0].type.shape} if e.has(Trait.RESHAPE) else {}
            found = [replace(own, params={**own.params, **shape})]
        for x in found:
            equations += x.params["body"].equations if x.form == HORIZONTAL else (x,)
    donated = [v for v in program.inputs if v in program.donated]
    pairs = sorted(zip(donated, program.outputs, strict=True), key=lambda pair: not mapped[pair[1]])
    inputs = (*(v for v, _ in pairs), *(v for v in program.inputs if v not in program.donated), *program.constants)
    outputs = tuple(names[v] for _, v in pairs)
    return Program(tuple(names[v] for v in inputs), {}, tuple(equations), outputs), names


def _of_member(of_all: ArrayType) -> ArrayType:
    return ArrayType(of_all.shape[1:], of_all.dtype)
