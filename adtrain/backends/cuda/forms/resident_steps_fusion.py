"""Fuse all launches of a sweep's step, and several steps, into one launch, if the first layer can stay on chip.

A cluster of thread blocks computes several steps of one member. The weights of the first layer and their optimizer
state stay in shared memory (resident). So they are read from device memory once in a launch, not several times in each
step. The blocks divide the other equations by the units of the layer (`cluster_shards.py`).
"""

from __future__ import annotations

from dataclasses import replace

from adtrain.backends.cuda.forms.cluster_shards import cluster_shards
from adtrain.backends.cuda.forms.resident_layer import resident_layer
from adtrain.core.fused import RESIDENT_STEPS, fused_p, launched_together
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program
from adtrain.core.staging import Results, keeps
from adtrain.core.target import Target

MIN_CAPABILITY = (9, 0)
"""The first compute capability with clusters."""


@keeps(Results.EXACT)
def fuse_resident_steps(program: Program, target: Target) -> Program:
    """The step of all members as one equation, if their first layer can stay on chip. Else the Program, unchanged."""
    body = None if target.capability < MIN_CAPABILITY else step_of_member(program)
    if body is None:
        return program
    made = {v for e in body.equations if not e.has(Trait.RESHAPE) for v in e.outputs}
    layer = resident_layer(body) if made.issuperset(body.outputs) else None
    blocks = layer.blocks(target.shared) if layer else None
    if layer is None or blocks is None or cluster_shards(body, layer, blocks) is None:
        return program
    scopes = dict.fromkeys(scope for e in program.equations for scope in e.scope.split("+") if scope)
    ends = body.inputs, {"form": RESIDENT_STEPS, "body": body}, body.outputs
    return replace(program, equations=(Equation(fused_p, *ends, "+".join(scopes), layer.backward.phase),))


def step_of_member(program: Program) -> Program | None:
    """A step that can repeat, with the equations of `horizontal` equations in place of these.

    Inputs that a step replaces come first, in the order of the outputs that replace them, as `resident_layer.carried`
    expects. None if the Program is no such step by member, or if batching rules compute some of its equations.
    """
    distinct = len(set(program.outputs)) == len(program.outputs)
    stacked = any(e.has(Trait.MEMBERS) for e in program.equations)
    if not program.members or not program.carries or not distinct or stacked:
        return None
    others = (v for v in program.inputs if v not in program.donated)
    inputs = (*program.donated_inputs, *others, *program.constants)
    equations = tuple(x for e in program.equations for x in launched_together(e))
    return Program(inputs, {}, equations, program.outputs)
