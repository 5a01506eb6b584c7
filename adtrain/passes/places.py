"""Places: where the values of a Program are stored, and which of them may overwrite one another."""

from __future__ import annotations

from typing import NamedTuple

from adtrain.core.kernel import has_kernels
from adtrain.core.primitive import Trait
from adtrain.core.program import LOOPS, OVERWRITES, Equation, Variable
from adtrain.passes.fuse_elementwise import by_element


class Place(NamedTuple):
    """The memory of a value.

    ``where`` is "input", "constant" or "output", and ``at`` its number; or "arena", and ``at`` the offset in bytes; or
    "shared", the memory that ranks share. A part of an input, constant or output, and a value in shared memory, begins
    ``offset`` bytes after the start of the memory.
    """

    where: str
    at: int
    offset: int = 0


def nbytes(v: Variable) -> int:
    """The bytes of a value. Those of one member if it is mapped."""
    return v.size * v.type.dtype.itemsize


def stored_bytes(v: Variable) -> int:
    """The bytes of the array in memory."""
    return v.stored.size * v.type.dtype.itemsize


def overwrites(equation: Equation, argument: Variable, result: Variable) -> bool:
    """Whether ``result`` may overwrite ``argument``: each element is read before it is written."""
    if argument in equation.inputs and not argument.members == result.members == equation.members:
        return False  # what all members share is read for each of them
    if equation.has(Trait.UPDATE):
        return equation.inputs.index(argument) == 0 if argument in equation.inputs else True
    if equation.form in OVERWRITES:
        return OVERWRITES[equation.form](equation, argument, result)
    if has_kernels(equation.form, "cpu") or has_kernels(equation.form, "cuda"):  # a kernel in a file: nothing is known
        return argument not in equation.inputs
    if equation.form and equation.form != LOOPS:
        return read_once(equation, argument, result)
    if argument not in equation.inputs:
        return True
    return by_element(equation) and argument.type == result.type


def read_once(equation: Equation, argument: Variable, result: Variable) -> bool:
    """Whether the equation of a body that computes ``result`` alone reads ``argument``, and may overwrite it."""
    readers = equation.params["body"].readers.get(argument, ())
    if len(readers) == 1 and result in readers[0].outputs:
        return overwrites(readers[0], argument, result)
    return not readers


def of_one_type(equation: Equation, argument: Variable, result: Variable) -> bool:
    return argument.type == result.type
