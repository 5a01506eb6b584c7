"""What runs for an equation: tasks, each a kernel with all that its launch needs but a device.

Nothing here needs a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from adtrain.backends.cuda.compiler import Source, file_source
from adtrain.backends.cuda.loops import loops
from adtrain.core.errors import DeviceError
from adtrain.core.fused import FUSED, loops_p, product_p
from adtrain.core.kernel import CudaKernel, no_bytes
from adtrain.core.program import Equation
from adtrain.passes.fuse_elementwise import elementwise

Problem: TypeAlias = "tuple[Any, ...]"
"""What candidates are measured for: a primitive, the types of its arguments, and its parameters."""

FASTEST: dict[Problem, str] = {}
"""The label of the candidate to take, by problem: what measurement has found. Others are computed by the first one."""


class Size(NamedTuple):
    """How much work a task has: independent elements, or blocks of up to ``threads`` threads each."""

    elements: int = 0
    blocks: tuple[int, int, int] = (0, 0, 0)
    threads: int | None = None
    shared: int = 0

    @property
    def empty(self) -> bool:
        return not self.elements and 0 in self.blocks


@dataclass(frozen=True)
class Task:
    """One launch.

    Attributes:
        operands: what the pointers are: numbers in the list of the equation's inputs and outputs.
        scratch: whether the kernel takes a pointer to the equation's scratch.
        checked: whether it takes a pointer to a flag for indices out of range.
    """

    source: Source
    name: str
    operands: tuple[int, ...]
    numbers: tuple[int | float, ...]
    size: Size
    scratch: bool = False
    checked: bool = False


def tasks(equation: Equation, kernel: CudaKernel | None = None) -> list[Task]:
    """The launches that compute an unfused or `loops` equation, in order. A reshape has none.

    Args:
        kernel: the candidate to take, by default the chosen one.

    Raises:
        DeviceError: no kernel computes it.
    """
    if equation.primitive.name == "reshape":
        return []
    everything = tuple(range(len(equation.inputs) + len(equation.outputs)))
    if equation.primitive is loops_p or elementwise(equation):
        made = loops(equation)
        inputs = tuple(equation.inputs.index(v) for v in dict.fromkeys(equation.inputs))
        operands = (*inputs, *everything[len(equation.inputs) :])
        size = Size(elements=-(-made.elements // made.width))
        return [Task(made.source, "loops", operands, (made.elements,), size)]
    kernel = kernel or chosen(equation)
    types = [v.type for v in equation.inputs]
    if not kernel.each:
        return list(_chain(kernel, types, equation.params, everything))
    out = len(types)
    return [task for i in range(out) for task in _chain(kernel, [i, *types], equation.params, (i, out))]


def scratch(equation: Equation, kernel: CudaKernel | None = None) -> int:
    """Bytes of device memory that the equation's kernels need beside its inputs and outputs; see `tasks`."""
    if equation.primitive in FUSED or elementwise(equation) or equation.primitive.name == "reshape":
        return 0
    kernel = kernel or chosen(equation)
    types, most = [v.type for v in equation.inputs], 0
    while kernel is not None:
        most = max(most, 0 if kernel.each else kernel.scratch(*types, **equation.params))
        kernel = kernel.then
    return most


def candidates(equation: Equation) -> list[CudaKernel]:
    """The kernels that are right for the equation, the one to take where nothing has been measured first.

    Of a product with what is done to its elements they are those of the product.
    """
    equation = _deciding(equation)
    types = [v.type for v in equation.inputs]
    named = equation.primitive.implementations.get("cuda", ())
    if not isinstance(named, (tuple, CudaKernel)):
        named = named(*types, **equation.params)
    kernels = (named,) if isinstance(named, CudaKernel) else named
    return [k for k in kernels if k.applies(*([0] if k.each else []), *types, **equation.params)]


def chosen(equation: Equation) -> CudaKernel:
    """The candidate that the equation runs with: the fastest one if that is known, else the first.

    Raises:
        DeviceError: there is none.
    """
    found = candidates(equation)
    if not found:
        types = ", ".join(str(v.type) for v in equation.inputs)
        raise DeviceError(
            f"{equation.primitive.name} of {types or 'nothing'} has no kernel for the GPU; use --device cpu"
        )
    fastest = FASTEST.get(problem(equation))
    if fastest is None:
        return found[0]
    return next((k for k in found if label(k, equation) == fastest), found[0])


def problem(equation: Equation) -> Problem:
    """What decides which candidate of the equation is fastest; of a product with what is done to it, the product."""
    equation = _deciding(equation)
    return equation.primitive, tuple(v.type for v in equation.inputs), tuple(equation.params.items())


def label(kernel: CudaKernel, equation: Equation) -> str:
    """`CudaKernel.label` for the equation that ``kernel`` is a candidate of."""
    equation = _deciding(equation)
    return kernel.label(*([0] if kernel.each else []), *(v.type for v in equation.inputs), **equation.params)


def _deciding(equation: Equation) -> Equation:
    if equation.primitive is not product_p:
        return equation
    return next(e for e in equation.params["body"].equations if e.primitive is not loops_p and not elementwise(e))


def _chain(kernel: CudaKernel, args: Sequence[Any], params: Any, operands: tuple[int, ...]) -> Iterator[Task]:
    with_scratch = kernel.scratch is not no_bytes
    step: CudaKernel | None = kernel
    while step is not None:
        definitions = tuple(sorted(step.definitions(*args, **params).items()))
        source = file_source(step.file, step.dtypes(*args, **params), definitions)
        numbers = tuple(float(x) if isinstance(x, float) else int(x) for x in step.numbers(*args, **params))
        yield Task(source, step.name, operands, numbers, _size(step, args, params), with_scratch, step.checked)
        step = step.then


def _size(kernel: CudaKernel, args: Sequence[Any], params: Any) -> Size:
    if kernel.elements is not None:
        return Size(elements=kernel.elements(*args, **params))
    assert kernel.blocks is not None, f"{kernel.name} names neither elements nor blocks"
    found = kernel.blocks(*args, **params)
    x, y, z = (*(found if isinstance(found, tuple) else (found,)), 1, 1)[:3]
    threads = None if kernel.threads is None else kernel.threads(*args, **params)
    return Size(0, (x, y, z), threads, kernel.shared(*args, **params))
