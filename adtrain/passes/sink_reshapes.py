"""Move elementwise equations before the reshape of a product, so that they can become the product's epilogue.

Example: the mask of the activation before a flatten layer, on the product that computes the flat gradient.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from adtrain.core.primitive import PRIMITIVES, Trait
from adtrain.core.program import LOOPS, Equation, Program, Variable
from adtrain.core.staging import Results, keeps
from adtrain.core.types import ArrayType, Shape


@keeps(Results.EXACT)
def sink_reshapes(program: Program) -> Program:
    """Swap loops and the reshape of a matrix product, where nothing else reads the reshape or the product."""
    producer = {v: e for e in program.equations for v in e.outputs}
    readers = Counter(v for e in program.equations for v in dict.fromkeys(e.inputs))
    readers.update(program.outputs)
    equations: list[Equation] = []
    for e in program.equations:
        reshapes = [producer[v] for v in e.inputs if v in producer and _is_own_product(v, producer, readers)]
        shape = e.outputs[0].type.shape
        if e.form != LOOPS or not reshapes or any(v.type.shape not in (shape, ()) for v in e.inputs):
            equations.append(e)
            continue
        flat = reshapes[0].inputs[0].type.shape
        unshaped = {v: producer[v].inputs[0] for v in e.inputs if v in producer and producer[v].has(Trait.RESHAPE)}
        equations += _moved(e, flat, {v: x for v, x in unshaped.items() if x.type.shape == flat})
    return replace(program, equations=tuple(equations))


def _is_own_product(v: Variable, producer: dict[Variable, Equation], readers: Counter[Variable]) -> bool:
    """Whether it is the reshape of a matrix product, and neither has another reader."""
    reshape = producer[v]
    if not reshape.has(Trait.RESHAPE) or readers[v] > 1:
        return False
    source = producer.get(reshape.inputs[0])
    return source is not None and source.has(Trait.MATMUL) and readers[reshape.inputs[0]] == 1


def _moved(loops: Equation, flat: Shape, unshaped: dict[Variable, Variable]) -> list[Equation]:
    """The loops on arrays of shape ``flat``, with reshapes before and after them.

    Args:
        unshaped: for an argument that is a reshape, the array before the reshape.
    """
    body: Program = loops.params["body"]
    shape = loops.outputs[0].type.shape
    variables = (*body.inputs, *(v for e in body.equations for v in e.outputs))
    of = {v: v.like(ArrayType(flat, v.type.dtype)) if v.type.shape == shape else v for v in variables} | unshaped

    def renamed(variables: tuple[Variable, ...]) -> tuple[Variable, ...]:
        return tuple(of[v] for v in variables)

    equations = [
        replace(
            e,
            inputs=renamed(e.inputs),
            outputs=renamed(e.outputs),
            params={**e.params, "shape": flat} if "shape" in e.params and e.params["shape"] == shape else e.params,
        )
        for e in body.equations
    ]
    moved = Program(renamed(body.inputs), {}, tuple(equations), renamed(body.outputs))
    before = [_reshape(loops, v, of[v]) for v in body.inputs if of[v] is not v and v not in unshaped]
    after = [_reshape(loops, of[v], v) for v in body.outputs if of[v] is not v]
    return [
        *before,
        replace(loops, inputs=moved.inputs, outputs=moved.outputs, params={**loops.params, "body": moved}),
        *after,
    ]


def _reshape(like: Equation, x: Variable, out: Variable) -> Equation:
    return Equation(PRIMITIVES["reshape"], (x,), {"shape": out.type.shape}, (out,), like.scope, like.phase)
