"""Generated kernels, assembled from parts. A part is the code of some of the thread blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from adtrain.backends.cuda.compiler import Source
from adtrain.codegen.expressions import c_type, pointer
from adtrain.core.program import Variable

# No contraction to FMA, so that an equation gives the same bits alone and fused.
OPTIONS = ("--fmad=false",)


@dataclass(frozen=True)
class Part:
    """The code of some thread blocks of a kernel.

    The lines may use x0, x1, ... (pointers to the inputs), y0, y1, ... (to the outputs), `block` (the number of the
    thread block among `blocks`), THREADS, and `scratch` and `bad` where the part asks for them.

    Attributes:
        lines: statements.
        headers: files of `kernels/cuda` that the lines need.
        definitions: text before the kernel; its names are unique to the part.
        blocks: how many thread blocks it takes.
        shared: bytes of dynamic shared memory.
        scratch: bytes of device memory.
        checked: whether it sets `*bad` where an index is out of range.
    """

    lines: Sequence[str]
    inputs: Sequence[Variable]
    outputs: Sequence[Variable]
    headers: Sequence[str] = ("common/common.cuh",)
    definitions: str = ""
    blocks: int = 1
    shared: int = 0
    scratch: int = 0
    checked: bool = False


@dataclass(frozen=True)
class Kernel:
    """A generated kernel ``name(pointers...[, char *scratch][, int *bad])``.

    Attributes:
        operands: what the pointers are.
    """

    source: Source
    name: str
    operands: Sequence[Variable]
    blocks: int
    threads: int
    shared: int
    scratch: int
    checked: bool


def kernel(name: str, parts: Sequence[Part], threads: int, element: str = "", resident: int = 1) -> Kernel:
    """A kernel of several parts; the thread blocks are assigned to them in this order.

    Args:
        element: the C type T of GEMM headers.
        resident: how many blocks a multiprocessor must have registers for.
    """
    written = {v for part in parts for v in part.outputs}
    operands = list(dict.fromkeys(v for part in parts for v in (*part.inputs, *part.outputs)))
    names = {v: f"p{i}" for i, v in enumerate(operands)}
    scratch, checked = sum(aligned(part.scratch) for part in parts), any(part.checked for part in parts)
    parameters = [f"{pointer(v, const=v not in written)}{names[v]}" for v in operands]
    parameters += ["char *scratch"] * bool(scratch) + ["int *bad"] * checked
    headers = dict.fromkeys(h for part in parts for h in part.headers)
    text = [
        *([f"#define T {element}"] if element else []),
        *(f'#include "{header}"' for header in headers),
        f"constexpr int THREADS = {threads};",
        *(part.definitions for part in parts if part.definitions),
        "",
        f"KERNEL __launch_bounds__(THREADS, {resident}) {name}({', '.join(parameters)})",
        "{",
        "    wait_for_inputs();",
        *(f"    {line}" for line in _dispatch(parts, names)),
        "}",
        "",
    ]
    return Kernel(
        Source(f"{name}.cu", "\n".join(text), OPTIONS),
        name,
        operands,
        sum(part.blocks for part in parts),
        threads,
        max(part.shared for part in parts),
        scratch,
        checked,
    )


def aligned(size: int) -> int:
    """`size` in bytes, rounded up to the alignment of the widest vector."""
    return -(-size // 16) * 16


def _dispatch(parts: Sequence[Part], names: dict[Variable, str]) -> Iterator[str]:
    first = at = 0
    for i, part in enumerate(parts):
        test = "{" if i == len(parts) - 1 else f"if (blockIdx.x < {first + part.blocks}) {{"
        yield f"else {test}" if i else test
        yield f"    const int block = blockIdx.x - {first}; (void)block;"
        for kind, variables in (("x", part.inputs), ("y", part.outputs)):
            for k, v in enumerate(variables):
                const = "const " if kind == "x" else ""
                yield f"    {const}{c_type(v.type.dtype)} *const {kind}{k} = {names[v]};"
        if part.scratch:
            yield f"    char *const own = scratch + {at};"
        yield from indented(part.lines)
        yield "}"
        first, at = first + part.blocks, at + aligned(part.scratch)


def indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def divided(index: str, lengths: Sequence[int], steps: Sequence[int]) -> str:
    """C text: the offset of element ``index`` (row-major in ``lengths``) in an array with strides ``steps``."""
    terms, below = [], 1
    for k in range(len(lengths) - 1, -1, -1):
        if steps[k] and lengths[k] > 1:
            quotient = index if below == 1 else f"{index} / {below}"
            whole = below * lengths[k] == math.prod(lengths)
            place = quotient if whole else f"{quotient} % {lengths[k]}"
            terms.append(place if steps[k] == 1 else f"{place} * {steps[k]}")
        below *= lengths[k]
    return " + ".join(reversed(terms)) or "0"
