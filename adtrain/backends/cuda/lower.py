"""What runs for an equation: tasks, each a kernel with all that its launch needs but a device.

Nothing here needs a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from adtrain.backends.cuda.codegen.block import block, threads_for
from adtrain.backends.cuda.codegen.loops import loops
from adtrain.backends.cuda.codegen.part import OPTIONS, Kernel, kernel
from adtrain.backends.cuda.codegen.product import Epilogue, epilogue, matmul_of
from adtrain.backends.cuda.codegen.rows import THREADS as ROW_THREADS
from adtrain.backends.cuda.codegen.rows import rows
from adtrain.backends.cuda.codegen.together import together
from adtrain.backends.cuda.compiler import Source, file_source
from adtrain.backends.cuda.vendor import LibraryCall, calls
from adtrain.core.errors import DeviceError
from adtrain.core.fused import PRODUCTS, block_p, pooled_p, rows_p, together_p
from adtrain.core.kernel import CudaKernel, no_bytes
from adtrain.core.program import Equation, Variable
from adtrain.lowering.cuda.gemm.matmul import Product, products
from adtrain.passes.fuse_elementwise import is_loops

Problem: TypeAlias = "tuple[Any, ...]"
"""What candidates are measured for: a primitive, the types of its arguments, and its parameters."""

Candidate: TypeAlias = "CudaKernel | LibraryCall"
"""One of several ways to compute an equation."""

MEASURED: dict[Problem, Mapping[str, float]] = {}
"""The microseconds of a launch of each candidate by label, by problem. Other problems are computed by the first one."""

MARGIN = 1.03
"""How many times the fastest one's time the first candidate may take and still be the one to take."""

SHORT = 256
"""Length of sums of products, at most, that take less time than an epilogue which reads matrices."""


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


def tasks(equation: Equation, kernel: Candidate | None = None) -> list[Task | LibraryCall]:
    """The launches that compute an equation, in order, or the call that does. A reshape has none.

    Args:
        kernel: the candidate to take, by default the chosen one.

    Raises:
        DeviceError: no kernel computes it.
    """
    if equation.primitive.name == "reshape":
        return []
    if is_loops(equation):
        made = loops(equation)
        places = _places(equation)
        operands = tuple(places[v] for v in (*made.inputs, *made.outputs))
        size = Size(elements=made.vectors)
        return [Task(made.source(), "loops", operands, (made.elements,), size, checked=made.checked)]
    generated = _generated(equation)
    if generated is not None:
        places = _places(equation)
        operands = tuple(places[v] for v in generated.operands)
        size = Size(0, (generated.blocks, 1, 1), generated.threads, generated.shared)
        checked, with_scratch = generated.checked, bool(generated.scratch)
        return [Task(generated.source, generated.name, operands, (), size, with_scratch, checked)]
    kernel = kernel or chosen(equation)
    if isinstance(kernel, LibraryCall):
        return [kernel]
    if equation.primitive in PRODUCTS:
        return _product(equation, kernel)
    types = [v.type for v in equation.inputs]
    everything = tuple(range(len(equation.inputs) + len(equation.outputs)))
    if not kernel.each:
        return list(_chain(kernel, types, equation.params, everything))
    out = len(types)
    return [task for i in range(out) for task in _chain(kernel, [i, *types], equation.params, (i, out))]


def scratch(equation: Equation, kernel: Candidate | None = None) -> int:
    """Bytes of device memory that what computes the equation needs beside its inputs and outputs; see `tasks`."""
    if is_loops(equation) or equation.primitive.name == "reshape":
        return 0
    generated = _generated(equation)
    if generated is not None:
        return generated.scratch
    kernel = kernel or chosen(equation)
    if isinstance(kernel, LibraryCall):
        return kernel.scratch
    computed = computing(equation)
    step: CudaKernel | None = kernel
    types, most = [v.type for v in computed.inputs], 0
    while step is not None:
        most = max(most, 0 if step.each else step.scratch(*types, **computed.params))
        step = step.then
    return most


def computing(equation: Equation) -> Equation:
    """The equation whose kernels compute it: the product in one of PRODUCTS, else `equation` itself."""
    return matmul_of(equation) if equation.primitive in PRODUCTS else equation


def candidates(equation: Equation) -> list[Candidate]:
    """What is right for the equation: kernels, the one to take where nothing has been measured first; then libraries.

    Of a product with what is done to its elements they are the kernels of the product, or those that can pool it.
    """
    if equation.primitive is pooled_p:
        product, pool = computing(equation), equation.params["body"].equations[-1]
        named = product.primitive.implementations["cuda_pooled"]
        return [*named(*(v.type for v in product.inputs), **product.params, **pool.params)]
    if equation.primitive in PRODUCTS:
        return [*_kernels(computing(equation))]
    return [*_kernels(equation), *calls(equation)]


def _kernels(equation: Equation) -> list[CudaKernel]:
    types = [v.type for v in equation.inputs]
    named = equation.primitive.implementations.get("cuda", ())
    if not isinstance(named, (tuple, CudaKernel)):
        named = named(*types, **equation.params)
    kernels = (named,) if isinstance(named, CudaKernel) else named
    return [k for k in kernels if k.applies(*([0] if k.each else []), *types, **equation.params)]


def chosen(equation: Equation) -> Candidate:
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
    times = MEASURED.get(problem(equation))
    if times is None:
        return found[0]
    labels = [label(k, equation) for k in found]
    return found[labels.index(fastest(labels, times))]


def fastest(labels: Sequence[str], times: Mapping[str, float]) -> str:
    """The label of the fastest candidate, or the first one where that is as fast within MARGIN, or none was timed."""
    taken = [times.get(name, math.inf) for name in labels]
    best = min(taken)
    return labels[0 if taken[0] <= MARGIN * best else taken.index(best)]


def problem(equation: Equation) -> Problem:
    """What decides which candidate of the equation is fastest; of a product with what is done to it, the product."""
    equation = computing(equation)
    return equation.primitive, tuple(v.type for v in equation.inputs), tuple(equation.params.items())


def label(kernel: Candidate, equation: Equation) -> str:
    """The candidate's `label`, of the equation that it is a candidate of."""
    if isinstance(kernel, LibraryCall):
        return kernel.label
    equation = computing(equation)
    return kernel.label(*([0] if kernel.each else []), *(v.type for v in equation.inputs), **equation.params)


def _places(equation: Equation) -> dict[Variable, int]:
    """The number of each variable in the list of the equation's inputs and outputs."""
    return {v: i for i, v in enumerate((*equation.inputs, *equation.outputs))}


def _generated(equation: Equation) -> Kernel | None:
    """The kernel of an equation that has one of its own making."""
    if equation.primitive is block_p:
        threads = threads_for(equation)
        return kernel("block", [block(equation, threads)], threads)
    if equation.primitive is rows_p:
        return kernel("rows", [rows(equation)], ROW_THREADS)
    if equation.primitive is together_p:
        return together(equation.params["body"].equations, _whole)
    return None


def _whole(equation: Equation) -> list[Product]:
    """The engines for a matrix product that stands in a kernel with others.

    Where sums are short the epilogue takes most of the time: engines whose threads share it evenly come first.
    """
    matmul = computing(equation)
    a, b = matmul.inputs
    found = products(a.type, b.type, **matmul.params)
    short = found[0].lengths[-1] <= SHORT
    ordered = sorted(found, key=lambda product: (short and not product.direct, product.parts > 1))
    return [replace(product, parts=1) for product in ordered]


def _product(equation: Equation, kernel: CudaKernel) -> list[Task | LibraryCall]:
    """The launches of a product by ``kernel`` with its epilogue."""
    matmul, after, places = computing(equation), epilogue(equation), _places(equation)
    operands = tuple(places[v] for v in (*matmul.inputs, *after.inputs, *after.outputs))
    found = _chain(kernel, [v.type for v in matmul.inputs], matmul.params, operands)
    return [replace(task, source=_with_epilogue(task, after)) for task in found]


def _with_epilogue(task: Task, after: Epilogue) -> Source:
    """A product's source with the epilogue in front of the file's own text, and, of a small product, its lengths."""
    types, line, rest = task.source.text.partition("#line")
    small = task.name == "gemm_direct"
    lengths = f"#define LENGTHS {', '.join(map(str, task.numbers[1:]))}\n" if small else ""
    text = f'{types}{lengths}#include "common/common.cuh"\n#define EPILOGUE\n{after.text}\n{line}{rest}'
    return task.source._replace(text=text, options=(*task.source.options, *OPTIONS))


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
