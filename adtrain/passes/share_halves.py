"""Operands of convolutions laid out in halves once, for two readers each.

conv2d(x, w), conv2d_input_grad(g, w) and conv2d_weight_grad(x, g)    ->    a = in_halves(x), b = in_halves(g),
conv2d_laid(x, a, w), conv2d_input_grad_laid(g, b, w) and conv2d_weight_grad_laid(x, g, a, b)
"""

from __future__ import annotations

from dataclasses import replace

from adtrain.core.fused import convolution_p
from adtrain.core.primitive import PRIMITIVES
from adtrain.core.program import Equation, Program, Variable


def share_halves(program: Program) -> Program:
    """Each convolution with its two gradients, where the kernels say that it pays."""
    equations = list(program.equations)
    for grad in program.equations:
        if grad.primitive.name != "conv2d_weight_grad":
            continue
        x, g = grad.inputs
        forward = next((e for e in equations if _reads(e, "conv2d", x, grad)), None)
        back = next((e for e in equations if _reads(e, "conv2d_input_grad", g, grad)), None)
        if forward is None or back is None:
            continue
        laid = [_in_halves(v, to, grad) for v, to in ((x, g), (g, x))]
        shared = PRIMITIVES["conv2d_weight_grad_laid"]
        inputs = (x, g, *(e.outputs[0] for e in laid))
        if not shared.implementations["cuda"](*(v.type for v in inputs), **grad.params):
            continue
        for old, e in ((forward, laid[0]), (back, laid[1])):
            equations[equations.index(old)] = _with_laid(old, e.outputs[0])
        equations[equations.index(grad)] = replace(grad, primitive=shared, inputs=inputs)
        for e in laid:
            first = next(i for i, reader in enumerate(equations) if e.outputs[0] in reader.inputs)
            equations.insert(first, e)
    return replace(program, equations=tuple(equations))


def _convolution(equation: Equation) -> Equation:
    """The first equation of a `convolution`, or the one that `equation` is itself."""
    if equation.primitive is not convolution_p:
        return equation
    first: Equation = equation.params["body"].equations[0]
    return first


def _reads(equation: Equation, name: str, v: Variable, grad: Equation) -> bool:
    e = _convolution(equation)
    if e.primitive.name != name or e.inputs[0] is not v or e.params["window"] != grad.params["window"]:
        return False
    return e.inputs[1].type.shape == grad.outputs[0].type.shape


def _in_halves(v: Variable, to: Variable, grad: Equation) -> Equation:
    """In which form the gradient by the weights reads ``v``, its images or its gradients."""
    turned = v is not grad.inputs[0]
    params = {"y": to.type.shape, "turned": turned, **{name: grad.params[name] for name in ("window", "size")}}
    primitive = PRIMITIVES["in_halves"]
    (type_,) = primitive.output_types((v.type,), params)
    return Equation(
        primitive, (v,), params, (Variable(type_, v.device),), grad.scope, "backward" if turned else "forward"
    )


def _with_laid(equation: Equation, laid: Variable) -> Equation:
    """The convolution with its images in halves as its second argument."""
    e = _convolution(equation)
    images, weights = e.inputs
    shared = replace(e, primitive=PRIMITIVES[f"{e.primitive.name}_laid"], inputs=(images, laid, weights))
    if equation is e:
        return shared
    body: Program = equation.params["body"]
    inputs = (*equation.inputs, laid)
    inside = replace(body, inputs=(*body.inputs, laid), equations=(shared, *body.equations[1:]))
    return replace(equation, inputs=inputs, params={"body": inside})
