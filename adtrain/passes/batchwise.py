"""Batch-wise equations: item n of an output needs item n of the inputs only. An item is an index of axis 0, or some
neighbouring ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from adtrain.core.kernel import CKernel, value_for
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation
from adtrain.core.registry import c_kernels
from adtrain.passes.fuse_elementwise import by_element


@dataclass(frozen=True)
class Batchwise:
    """How an equation works batch-wise.

    Attributes:
        count: number of items, the length of axis 0.
        flags: for each input True if item n of the output needs item n of it; False if it needs the whole input.
        sums: the outputs are sums over the items.
    """

    count: int
    flags: tuple[bool, ...]
    sums: bool


def batchwise(equation: Equation) -> Batchwise | None:
    """How the C kernels compute `equation` batch-wise, or None if they do not."""
    if equation.has(Trait.RESHAPE):
        return _reshaped(equation)
    found = _without_kernel(equation)
    kernel = item_kernel(equation)
    if found is not None or kernel is None:
        return found
    flags = value_for(kernel.items, *(v.type for v in equation.inputs), **equation.params)
    assert flags is not None
    lengths = {v.type.shape[0] for v, flag in zip(equation.inputs, flags, strict=True) if flag}
    if not kernel.sums:
        lengths |= {v.type.shape[0] for v in equation.outputs}
    return Batchwise(lengths.pop(), flags, kernel.sums) if len(lengths) == 1 else None


def is_divisible(equation: Equation) -> bool:
    """Whether several neighbouring items can be one item."""
    if by_element(equation) or equation.has(Trait.RESHAPE):
        return True
    kernel = item_kernel(equation)
    return kernel is not None and kernel.several_items and not equation.has(Trait.GATHER)


def item_count(equations: Sequence[Equation]) -> int:
    """The number of items of the equations of one group. It divides the number of each."""
    return min(item_rule(e).count for e in equations)


def rowwise(equation: Equation) -> Batchwise | None:
    """How `equation` works row by row, from its meaning alone; None if it does not."""
    if not equation.has(Trait.ALONG_AXIS):
        return _without_kernel(equation)
    shape, params = equation.inputs[0].type.shape, equation.params
    axes = params["axes"] if "axes" in params else (params["axis"],)
    return Batchwise(shape[0], (True,) * len(equation.inputs), False) if shape and 0 not in axes else None


def kernels(equation: Equation) -> tuple[CKernel, ...]:
    """The C functions of `equation`'s primitive."""
    return c_kernels(equation.name)


def item_rule(equation: Equation) -> Batchwise:
    """How an equation works item by item."""
    found = batchwise(equation)
    assert found is not None
    return found


def item_kernel(equation: Equation) -> CKernel | None:
    """The C function that computes one item of `equation`."""
    types = [v.type for v in equation.inputs]
    functions = [k for k in kernels(equation) if not k.team]
    return next((k for k in functions if value_for(k.items, *types, **equation.params) is not None), None)


def _reshaped(equation: Equation) -> Batchwise | None:
    """A reshape has the items that both shapes can be divided into: (B, S, F) and (B S, F) have B."""
    (x,), (y,) = equation.inputs, equation.outputs
    if not x.type.shape or not y.type.shape:
        return None
    return Batchwise(gcd(x.type.shape[0], y.type.shape[0]), (True,), False)


def _without_kernel(equation: Equation) -> Batchwise | None:
    """Reshapes and elementwise equations, which need no kernel of their own."""
    shape = equation.outputs[0].type.shape
    if not shape:
        return None
    if equation.has(Trait.RESHAPE):
        same = equation.inputs[0].type.shape[:1] == shape[:1]
        return Batchwise(shape[0], (True,), False) if same else None
    if by_element(equation):
        flags = tuple(len(v.type.shape) == len(shape) and v.type.shape[0] == shape[0] for v in equation.inputs)
        return Batchwise(shape[0], flags, False)
    return None
