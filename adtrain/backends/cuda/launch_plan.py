"""The launches of an equation as values, before a device and addresses are known."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from adtrain.backends.cuda.codegen.loops import Epilogue, factors_of, loops
from adtrain.backends.cuda.codegen.part import OPTIONS, Kernel
from adtrain.backends.cuda.compiler import Source, file_source, of_kernel
from adtrain.backends.cuda.vendor import LibraryCall
from adtrain.codegen.elementwise import c_type
from adtrain.core.kernel import CudaKernel, CudaLaunch, TensorMap
from adtrain.core.program import Equation, Variable

WITH_CONSTANT_LENGTHS = ("small_gemm", "gemm_bf16x3")
"""Kernels whose lengths, except the batch, are constants in a fused product's source: divisions by these are fast."""


class WorkSize(NamedTuple):
    """The size of a launch: either the elements of a grid-stride loop, or blocks.

    Attributes:
        elements: of a grid-stride loop; 0 if there are `blocks`.
        blocks: of the grid, in x, y and z.
        threads: of a block; None: as many as give the best occupancy.
        shared: bytes of dynamic shared memory. It is a plain int: a Program with a `MemoryLayout` is not cached.
    """

    elements: int = 0
    blocks: tuple[int, int, int] = (0, 0, 0)
    threads: int | None = None
    shared: int = 0

    @property
    def empty(self) -> bool:
        return not self.elements and 0 in self.blocks


@dataclass(frozen=True)
class LaunchPlan:
    """One launch, before a device and addresses are known.

    Attributes:
        operands: the pointer arguments, as positions in the list of the equation's inputs and outputs.
        numbers: the arguments after the pointers: int64_t and double.
        scratch: whether the kernel takes a pointer to the equation's scratch.
        checked: whether it takes a pointer to a flag for indices out of range.
        cooperative: whether its blocks wait for each other.
        peers: whether it takes the windows of all ranks.
        repeats: whether it computes several runs of the equation. Their number is an argument after `numbers`.
        maps: the tensor maps, its first argument. Their operands are positions, as in `operands`.
    """

    source: Source
    name: str
    operands: tuple[int, ...]
    numbers: tuple[int | float, ...]
    size: WorkSize
    scratch: bool = False
    checked: bool = False
    cooperative: bool = False
    peers: bool = False
    repeats: bool = False
    maps: tuple[TensorMap, ...] = ()


class Plan(NamedTuple):
    """The launches of an equation and the bytes of their scratch memory."""

    launches: list[LaunchPlan | LibraryCall]
    scratch: int


def loops_plan(equation: Equation) -> LaunchPlan:
    """The launch of an elementwise equation."""
    made = loops(equation)
    operands = _operands(equation, (*made.inputs, *made.outputs))
    size = WorkSize(elements=made.vectors)
    return LaunchPlan(made.source(), "loops", operands, (made.elements,), size, checked=made.checked)


def generated_plan(equation: Equation, made: Kernel) -> LaunchPlan:
    """The launch of a generated kernel of an equation."""
    operands = _operands(equation, made.operands)
    size = WorkSize(0, (made.blocks, made.members, 1), made.threads, int(made.shared))
    if made.elements:
        size = WorkSize(elements=made.elements)
    scratch = bool(made.scratch)
    return LaunchPlan(
        *(made.source, made.name, operands, tuple(made.numbers), size, scratch, made.checked),
        peers=made.peers,
        repeats=made.repeats,
    )


def product_plans(equation: Equation, kernel: CudaKernel, after: Epilogue) -> list[LaunchPlan]:
    """The launches of a candidate for a product or convolution with an epilogue."""
    operands = _operands(equation, (*factors_of(equation), *after.inputs, *after.outputs))
    return [replace(plan, source=_with_epilogue(plan, after)) for plan in _plans(kernel, operands)]


def kernel_plans(equation: Equation, kernel: CudaKernel) -> list[LaunchPlan]:
    """The launches of a candidate for an equation. The compiler compares a user's kernel with its prototype."""
    plans = _plans(kernel, tuple(range(len(equation.inputs) + len(equation.outputs))))
    return [replace(x, source=_with_prototype(equation, x)) if os.path.isabs(x.source.name) else x for x in plans]


def _operands(equation: Equation, variables: Sequence[Variable]) -> tuple[int, ...]:
    """The position of each variable in the list of the equation's inputs and outputs."""
    positions = {v: i for i, v in enumerate((*equation.inputs, *equation.outputs))}
    return tuple(positions[v] for v in variables)


def _with_prototype(equation: Equation, plan: LaunchPlan) -> Source:
    """A source with the prototype of the kernel that a launch calls, before the file's own text."""
    inputs = [f"const {c_type(v.type.dtype)} *" for v in equation.inputs]
    arrays = [*inputs, *(f"{c_type(v.type.dtype)} *" for v in equation.outputs)]
    parameters = [arrays[i] for i in plan.operands]
    parameters += ["double" if isinstance(x, float) else "int64_t" for x in plan.numbers]
    parameters += ["char *"] * plan.scratch + ["int *"] * plan.checked
    prototype = f'extern "C" __global__ void {plan.name}({", ".join(parameters)});'
    return with_definitions(plan.source, prototype)


def _with_epilogue(plan: LaunchPlan, after: Epilogue) -> Source:
    """A product's source with the epilogue before the file's own text, and its lengths where the file takes them."""
    types, line, rest = plan.source.text.partition("#line")
    lengths = f"#define LENGTHS {', '.join(map(str, plan.numbers[1:]))}\n" if plan.name in WITH_CONSTANT_LENGTHS else ""
    text = f'{types}{lengths}#include "common/common.cuh"\n#define EPILOGUE\n{after.text}\n{line}{rest}'
    return plan.source._replace(text=text, options=(*plan.source.options, *OPTIONS))


def with_definitions(source: Source, text: str, options: Sequence[str] = ()) -> Source:
    """A file's source with definitions before its own text, and more options."""
    types, line, rest = source.text.partition("#line")
    text = f'{types}#include "common/common.cuh"\n{text}\n{line}{rest}'
    return source._replace(text=text, options=(*source.options, *options))


def launch_source(launch: CudaLaunch) -> Source:
    """The file of a launch, with its types and macros."""
    macros = tuple(sorted(launch.definitions.items()))
    return file_source(launch.file, launch.dtypes, macros, launch.shared, *launch.layouts)


def _plans(kernel: CudaKernel, operands: tuple[int, ...]) -> list[LaunchPlan]:
    """The launches of a candidate. A launch that names no operands gets all."""

    def plan(launch: CudaLaunch) -> LaunchPlan:
        numbers = tuple(float(x) if isinstance(x, float) else int(x) for x in launch.numbers)
        mapped = {x.operand for x in launch.maps}
        given = (i for i in range(len(operands)) if i not in mapped) if launch.operands is None else launch.operands
        pointers = tuple(operands[i] for i in given)
        scratch = kernel.scratch is not None
        return LaunchPlan(
            *(of_kernel(launch_source(launch), launch.name), launch.name, pointers, numbers, _size(launch), scratch),
            *(launch.checked, launch.cooperative),
            maps=tuple(replace(x, operand=operands[x.operand]) for x in launch.maps),
        )

    return [plan(launch) for launch in kernel.launches]


def _size(launch: CudaLaunch) -> WorkSize:
    if launch.elements is not None:
        return WorkSize(elements=launch.elements)
    assert launch.blocks is not None, f"{launch.name} names neither elements nor blocks"
    blocks = launch.blocks if isinstance(launch.blocks, tuple) else (launch.blocks,)
    x, y, z = (*blocks, 1, 1)[:3]
    return WorkSize(0, (x, y, z), launch.threads, int(launch.shared))
