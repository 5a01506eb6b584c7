"""Which equations work item by item: what they need for item n of their outputs is item n of their inputs."""

from __future__ import annotations

from dataclasses import dataclass

from adtrain.core.fused import loops_p
from adtrain.core.kernel import CKernel
from adtrain.core.program import Equation
from adtrain.core.registry import c_kernels
from adtrain.passes.fuse_elementwise import elementwise


@dataclass(frozen=True)
class ByItem:
    """How an equation works item by item.

    Attributes:
        count: number of items, the length of axis 0.
        flags: for each input whether item n needs item n of it only; otherwise it needs all of it.
        sums: the outputs are sums over the items.
    """

    count: int
    flags: tuple[bool, ...]
    sums: bool


def by_item(equation: Equation) -> ByItem | None:
    """How `equation` works item by item, or None if it does not."""
    if equation.primitive.name == "reshape":
        (x,), (out,) = equation.inputs, equation.outputs
        same = x.type.shape and out.type.shape and x.type.shape[0] == out.type.shape[0]
        return ByItem(out.type.shape[0], (True,), False) if same else None
    if elementwise(equation) or equation.primitive is loops_p:
        return _loops_by_item(equation)
    kernel = item_kernel(equation)
    if kernel is None:
        return None
    flags = kernel.items(*(v.type for v in equation.inputs), **equation.params)
    assert flags is not None
    lengths = {v.type.shape[0] for v, flag in zip(equation.inputs, flags, strict=True) if flag}
    if not kernel.sums:
        lengths |= {v.type.shape[0] for v in equation.outputs}
    return ByItem(lengths.pop(), flags, kernel.sums) if len(lengths) == 1 else None


def kernels(equation: Equation) -> tuple[CKernel, ...]:
    """The candidates among the C functions of `equation`'s primitive."""
    return c_kernels(equation.primitive.name)


def item_kernel(equation: Equation) -> CKernel | None:
    """The C function that computes one item of `equation`."""
    types = [v.type for v in equation.inputs]
    return next((k for k in kernels(equation) if not k.team and k.items(*types, **equation.params) is not None), None)


def _loops_by_item(equation: Equation) -> ByItem | None:
    shape = equation.outputs[0].type.shape
    if not shape:
        return None
    flags = tuple(len(v.type.shape) == len(shape) and v.type.shape[0] == shape[0] for v in equation.inputs)
    return ByItem(shape[0], flags, False)
