"""Generated functions of a layer's kernel: the update of its weights and their optimizer state, and its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from adtrain.backends.cuda.codegen.loops import flat
from adtrain.backends.cuda.codegen.part import indented
from adtrain.backends.cuda.codegen.product import epilogue
from adtrain.backends.cuda.forms.resident_layer import input_of_byte
from adtrain.codegen.elementwise import statements
from adtrain.codegen.expressions import c_type
from adtrain.core.fused import body_of
from adtrain.core.program import Equation, Program, Variable


def updated_arrays(update: Equation) -> Sequence[Variable]:
    """The arrays that an update reads besides the gradient: a `product` equation with such an epilogue."""
    (gradient,) = body_of(update).equations[0].outputs
    return [v for v in epilogue(update).inputs if v.type.shape == gradient.type.shape]


def update_arguments(update: Equation) -> Sequence[Variable]:
    """The single numbers that an update reads, such as the learning rate."""
    arrays = updated_arrays(update)
    return [v for v in epilogue(update).inputs if v not in arrays]


def update_struct(update: Equation, before: Sequence[Variable], after: Sequence[Variable]) -> Iterator[str]:
    """A struct `Update` that updates a number of each array, given the gradient. It holds the `update_arguments`.

    Args:
        before, after: the arrays, in the order of the numbers.
    """
    numbers = update_arguments(update)
    product, *others = flat(body_of(update)).equations
    values = {product.outputs[0]: "gradient"} | {v: f"a{i}" for i, v in enumerate(numbers)}
    values |= {v: f"state[{i}]" for i, v in enumerate(before)}
    program = Program(tuple(values), {}, tuple(others), tuple(after))
    yield "struct Update {"
    yield from (f"    {c_type(v.type.dtype)} a{i};" for i, v in enumerate(numbers))
    yield f"    __device__ __forceinline__ void operator()(float gradient, float (&state)[{len(before)}]) const {{"
    yield from indented(indented(list(statements(program, values, [f"const float new{i}" for i in range(len(after))]))))
    yield from (f"        state[{i}] = new{i};" for i in range(len(after)))
    yield "    }"
    yield "};"


def input_function(gather: Equation) -> Iterator[str]:
    """A function `input_of_byte` from a byte of the table, and the single numbers, to an input of the layer."""
    program, numbers = input_of_byte(gather)
    values = {program.inputs[0]: "byte"} | {v: f"a{i}" for i, v in enumerate(numbers)}
    parameters = ["uint8_t byte", *(f"{c_type(v.type.dtype)} a{i}" for i, v in enumerate(numbers))]
    yield f"static __device__ float input_of_byte({', '.join(parameters)})"
    yield "{"
    yield from indented(statements(program, values, ["const float found"]))
    yield "    return found;"
    yield "}"
