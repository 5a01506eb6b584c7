"""Generated kernels, assembled from parts. A part is the code of some of the thread blocks;
steps are statements of one block, whose threads divide the work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd
from types import MappingProxyType

from adtrain.backends.cuda.compiler import Source
from adtrain.codegen.elementwise import c_type, pointer
from adtrain.core.kernel import WARP, Target
from adtrain.core.program import Equation, Variable

# No contraction to FMA, so that an equation gives the same bits alone and fused.
OPTIONS = ("--fmad=false",)
FIRST_STATEMENT = "wait_for_inputs();"

DRIVER_SHARED = 1 << 10
"""Bytes of shared memory of each block that the driver uses."""
MAX_RESIDENT_BLOCKS = 2
"""Maximum of blocks on a multiprocessor. Each then has the registers that it needs."""
MAX_DIFFERENT = 16
"""Maximum parts of different lengths that share code. A block selects the lengths and pointers of its part."""


@dataclass(frozen=True)
class Part:
    """The code of some thread blocks of a kernel.

    The lines may use x0, x1, ... (pointers to the inputs), y0, y1, ... (to the outputs), `block` (the number of the
    thread block among `blocks`) and THREADS. If the part asks for them, also `own` (its scratch memory), `scratch` (the
    scratch memory of all parts), `bad` and `windows`.

    Attributes:
        lines: statements.
        headers: files of `kernels/cuda` that the lines need.
        definitions: text before the kernel; its names are unique to the part.
        blocks: how many thread blocks it takes.
        shared: bytes of dynamic shared memory.
        scratch: bytes of device memory.
        checked: whether it sets `*bad` where an index is out of range.
        peers: whether it exchanges data with other GPUs, through `windows` (kernels/cuda/index/peer_window.cuh).
        lengths: int constants n0, n1, ... that the lines may use.
        fills_registers: whether the part needs nearly all registers. Then the compiler must not load the pointers of
            all parts at the start of the kernel.
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
    peers: bool = False
    lengths: Sequence[int] = ()
    fills_registers: bool = False


@dataclass(frozen=True)
class Kernel:
    """A generated kernel ``name(pointers...[, char *scratch][, int *bad][, const Windows windows])``.

    Attributes:
        operands: what the pointers are.
        blocks: of each member.
        members: how many members it computes; they are dimension y of the grid.
        repeats: whether it computes several runs of its equation. Their number is the argument after the pointers.
        numbers: arguments after the pointers: int64_t.
        elements: of a grid-stride loop; 0 if there are `blocks`.
    """

    source: Source
    name: str
    operands: Sequence[Variable]
    blocks: int
    threads: int
    shared: int
    scratch: int
    checked: bool
    members: int = 1
    peers: bool = False
    repeats: bool = False
    numbers: Sequence[int] = ()
    elements: int = 0


def part_names(inputs: Sequence[Variable], outputs: Sequence[Variable]) -> dict[Variable, str]:
    """The pointers to a part's inputs and outputs."""
    return {v: f"x{i}" for i, v in enumerate(inputs)} | {v: f"y{i}" for i, v in enumerate(outputs)}


def kernel(
    name: str,
    parts: Sequence[Part],
    threads: int,
    element: str = "",
    resident: int = 1,
    cluster: int = 0,
    macros: Mapping[str, object] = MappingProxyType({}),
) -> Kernel:
    """A kernel of several parts; the thread blocks are assigned to them in this order.

    Args:
        element: the C type T of GEMM headers.
        resident: how many blocks a multiprocessor must have registers for.
        cluster: blocks of a cluster, for parts whose headers include `sm90/cluster.cuh`.
        macros: that the source is compiled with.
    """
    written = {v for part in parts for v in part.outputs}
    operands = list(dict.fromkeys(v for part in parts for v in (*part.inputs, *part.outputs)))
    names = {v: f"p{i}" for i, v in enumerate(operands)}
    scratch, checked = sum(aligned_to_vector(part.scratch) for part in parts), any(part.checked for part in parts)
    peers = any(part.peers for part in parts)
    parameters = [f"{pointer(v, const=v not in written)}{names[v]}" for v in operands]
    parameters += ["char *scratch"] * bool(scratch) + ["int *bad"] * checked
    parameters += ["const __grid_constant__ Windows windows"] * peers
    headers = dict.fromkeys(h for part in parts for h in part.headers)
    bounds = f"{'CLUSTER_DIMS ' * bool(cluster)}__launch_bounds__(THREADS, {resident})"
    text = [
        *([f"#define T {element}"] if element else []),
        f"constexpr int THREADS = {threads};",
        *(f'#include "{header}"' for header in headers),
        *dict.fromkeys(part.definitions for part in parts if part.definitions),
        "",
        f"KERNEL {bounds} {name}({', '.join(parameters)})",
        "{",
        f"    {FIRST_STATEMENT}",
        *(f"    {line}" for line in dispatch(parts, names)),
        "}",
        "",
    ]
    options = [
        *OPTIONS,
        *[f"-DCLUSTER={cluster}"] * bool(cluster),
        *(f"-D{key}={value}" for key, value in macros.items()),
    ]
    return Kernel(
        Source(f"{name}.cu", "\n".join(text), tuple(options)),
        name,
        operands,
        sum(part.blocks for part in parts),
        threads,
        max(part.shared for part in parts),
        scratch,
        checked,
        peers=peers,
    )


def for_members(made: Kernel, count: int) -> Kernel:
    """The kernel for `count` members: coordinate y of a block is its member. Mapped operands have a part of each."""
    lines = [f"p{i} += blockIdx.y * {v.size}ll;" for i, v in enumerate(made.operands) if v.members]
    size = aligned_to_vector(made.scratch)
    lines += [f"scratch += blockIdx.y * {size}ll;"] * bool(size)
    first = f"    {FIRST_STATEMENT}\n"
    text = made.source.text.replace(first, first + "".join(f"    {line}\n" for line in lines), 1)
    source = made.source._replace(text=text)
    return replace(made, source=source, members=count, scratch=size * count)


def resident_blocks(shared: int, target: Target) -> int:
    """How many blocks with `shared` bytes of shared memory a multiprocessor holds, at most MAX_RESIDENT_BLOCKS."""
    return min(MAX_RESIDENT_BLOCKS, (target.shared + DRIVER_SHARED) // (shared + DRIVER_SHARED))


def aligned_to_vector(size: int) -> int:
    """`size` in bytes, rounded up to whole vectors of 16 bytes, the widest ones."""
    return -(-size // 16) * 16


def dispatch(
    parts: Sequence[Part], names: Mapping[Variable, str], number: str = "blockIdx.x", scratch: int = 0
) -> Iterator[str]:
    """The code of each part for its blocks. The parts of a group share it and have their own pointers and lengths.

    Args:
        number: the number of a block among the blocks of all parts, as C text.
        scratch: the byte where the scratch memory of the parts begins.
    """
    groups = groups_of(parts)
    opaque = any(part.fills_registers for part in parts)
    first, at = 0, scratch
    for i, group in enumerate(groups):
        part, starts = group[0], [*accumulate((each.blocks for each in group), initial=first)]
        test = "{" if i == len(groups) - 1 else f"if ({number} < {starts[-1]}) {{"
        yield f"else {test}" if i else test
        integer = "int" if opaque else "const int"
        if len({each.blocks for each in group}) > 1:
            yield f"    {integer} member = {' + '.join(f'({number} >= {start})' for start in starts[1:-1])};"
            yield f"    const int block = {number} - ({_of_member(starts[:-1])}); (void)block;"
        elif len(group) > 1:
            yield f"    {integer} member = ({number} - {first}) / {part.blocks};"
            yield f"    const int block = ({number} - {first}) % {part.blocks}; (void)block;"
        else:
            yield f"    const int block = {number} - {first}; (void)block;"
        if len(group) > 1 and opaque:
            yield '    asm volatile("" : "+r"(member));'  # so that the compiler does not load all pointers at the start
        for k, lengths in enumerate(zip(*(each.lengths for each in group), strict=True)):
            yield f"    const {'int' if max(lengths) < 2**31 else 'int64_t'} n{k} = {_of_member(lengths)};"
            if len(set(lengths)) > 1 and (divisor := gcd(*lengths, 64)) > 1:
                yield f"    __builtin_assume(n{k} % {divisor} == 0);"  # for which tiles and vectors are whole
        for kind in "xy":
            columns = zip(*(each.inputs if kind == "x" else each.outputs for each in group), strict=True)
            for k, variables in enumerate(columns):
                const = "const " if kind == "x" else ""
                pointers = _of_member([names[v] for v in variables])
                yield f"    {const}{c_type(variables[0].type.dtype)} *const {kind}{k} = {pointers};"
        if part.scratch:
            place = f"scratch + {at}" + (f" + member * {aligned_to_vector(part.scratch)}ll" if len(group) > 1 else "")
            yield f"    char *const own = {place};"
        yield from indented(part.lines)
        yield "}"
        first, at = starts[-1], at + aligned_to_vector(part.scratch) * len(group)


def groups_of(parts: Sequence[Part]) -> list[list[Part]]:
    """The parts that share code. Their lengths and blocks may differ if they are few."""
    equal = defaultdict[object, list[Part]](list)
    for part in parts:
        dtypes = tuple(v.type.dtype for v in (*part.inputs, *part.outputs))
        equal[tuple(part.lines), part.definitions, part.scratch, dtypes].append(part)
    found: list[list[Part]] = []
    for group in equal.values():
        alike = defaultdict[object, list[Part]](list)
        for part in group:
            alike[(part.lengths, part.blocks) if len(group) > MAX_DIFFERENT else None].append(part)
        found += alike.values()
    return found


def _of_member(values: Sequence[object]) -> str:
    """C text: the value of the part with number `member`."""
    if len(set(values)) == 1:
        return str(values[0])
    *others, last = values
    return " ".join(f"member == {i} ? {value} :" for i, value in enumerate(others)) + f" {last}"


def indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


@dataclass(frozen=True)
class Step:
    """Statements between two barriers; they may use `t`, the thread's number.

    Attributes:
        threads: how many threads have work.
        partial: bytes, at `partial`, that this step writes for the next one.
        waits: False for asynchronous copies, which are complete after the next barrier.
        declared: declarations before all statements.
        early: statements that may run between the barriers before these, by the same threads: loads of arguments.
        loads: loads between the same barriers. They come before `lines` of all equations, which hide their latency.
    """

    lines: Sequence[str]
    threads: int
    partial: int = 0
    waits: bool = True
    declared: Sequence[str] = ()
    early: Sequence[str] = ()
    loads: Sequence[str] = ()


Names = Mapping[Variable, str]
StepRule = Callable[[Equation, Names, int], Sequence[Step]]
"""``form(equation, pointers of its variables, threads of the block)`` returns its steps."""


def loop(count: int, lines: Sequence[str], threads: int, unrolled: int = 4) -> Step:
    """`lines` for i = 0 ... count - 1, divided among the threads of the block.

    The compiler does not know how many i a thread has. If all threads have the same number, the text has it as a
    constant, so that the compiler unrolls the loop without a remainder. unrolled: the most i in a row.
    """
    if count <= threads:
        head = [f"if (const int i = t; i < {count}) {{"]
    elif count % threads == 0:
        rounds = f"for (int round = 0; round < {count // threads}; round++) {{"
        head = [f"#pragma unroll {unrolled}", rounds, "    const int i = t + round * THREADS;"]
    else:
        head = [f"#pragma unroll {unrolled}", f"for (int i = t; i < {count}; i += THREADS) {{"]
    return Step([*head, *indented(lines), "}"], count)


def lanes_for(count: int, rows: int, threads: int) -> int:
    """The lanes that share a row of `count` elements: a power of two, no more than have work."""
    most = min(1 << (count.bit_length() - 1), WARP)
    while most > 1 and rows * most > threads:
        most //= 2
    return most
