"""The only file here that uses the package's API for lowering to CUDA. Port this file when that API changes.

`Launch` and `Candidate`, which the scripts beside it dump, must stay the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adtrain import passes
from adtrain.assets import asset_path
from adtrain.backends.cuda import compiler
from adtrain.backends.cuda.forms.column_sum import COLUMN_SUM
from adtrain.backends.cuda.forms.one_block import ONE_BLOCK
from adtrain.backends.cuda.forms.row_fused import ROW_FUSED
from adtrain.backends.cuda.forms.row_products import ROW_PRODUCTS
from adtrain.backends.cuda.fusions import gpu_fusions
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Candidate as Kernel
from adtrain.backends.cuda.lower import Lowering
from adtrain.backends.cuda.runtime.layout import Layout
from adtrain.backends.cuda.targets import H200
from adtrain.core.errors import DeviceError
from adtrain.core.fused import HORIZONTAL
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program
from adtrain.core.target import Target
from adtrain.passes.fuse_elementwise import is_loops

NO_KERNEL = DeviceError
"""Raised where an equation has no kernel on the target."""

NOT_COMPILED = compiler.CudaCompilerError
Source = compiler.Source


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        file: the kernel's file in `kernels/cuda`, or the name of the generated translation unit.
        generated: the generated source text: what precedes the file's own text, or the whole translation unit.
        definitions: the macros on the command line, by name.
        options: the other compiler options.
        operands: the positions of the pointers among the equation's inputs and outputs.
        work: elements, blocks (x, y, z), threads of a block or None, and bytes of dynamic shared memory.
        flags: whether the kernel takes a pointer to scratch, and one to the flag for bad indices.
        source: what the compiler takes; not dumped.
    """

    kernel: str
    file: str
    generated: str
    definitions: Mapping[str, str]
    options: Sequence[str]
    operands: Sequence[int]
    numbers: Sequence[int | float]
    work: tuple[int, Sequence[int], int | None, int]
    flags: tuple[bool, bool]
    source: Source


@dataclass(frozen=True)
class Candidate:
    """One way to compute an equation: its label ("" where there is no choice), bytes of scratch, and launches."""

    label: str
    scratch: int
    launches: Sequence[Launch]


SHARED = {(7, 5): 64 << 10, (8, 0): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}
"""Bytes of shared memory of a block, by compute capability; 99 KiB for others (CUDA C++ Programming Guide)."""

lowering = Lowering(H200)


def set_target(capability: tuple[int, int], multiprocessors: int) -> None:
    """Choose the GPU that everything below is for."""
    global lowering
    lowering = Lowering(Target(capability, multiprocessors, SHARED.get(capability, 99 << 10)))
    compiler._source.cache_clear()


def fused(program: Program) -> Program:
    """The Program after all passes for a GPU."""
    for improve in (*passes.SIMPLIFY, *gpu_fusions(lowering.target)):
        program = improve(program)
    return program


def equations(program: Program) -> list[Equation]:
    """The distinct equations of repeated runs, in order."""
    return list(dict.fromkeys(step.equation for steps, _ in Layout(program, lowering).runs(2) for step in steps))


def memory(program: Program) -> Mapping[str, Any]:
    """Where the Program's arrays and scratch lie."""
    layout = Layout(program, lowering)
    return {
        "arena_bytes": layout.arena_bytes,
        "separate_bytes": layout.separate_bytes,
        "extra_bytes": layout.extra_bytes,
        "repeats": layout.repeats,
        "overwritten": sorted(layout.overwritten),
        "results": [[place.where, place.at] for place in layout.results],
        "runs": [
            [[[list(step.operands), step.scratch] for step in steps], [list(swap) for swap in swaps]]
            for steps, swaps in layout.runs(2)
        ],
        "arena": layout.arena,
    }


GENERATED = (ONE_BLOCK, ROW_FUSED, ROW_PRODUCTS, COLUMN_SUM, HORIZONTAL)
"""The fused primitives whose kernels are generated, without a choice."""


def candidates(equation: Equation) -> list[Candidate]:
    """All ways to compute the equation, in order; one without a label where there is no choice."""
    no_choice = is_loops(equation) or equation.form in GENERATED
    if no_choice or equation.has(Trait.RESHAPE):
        return [Candidate("", lowering.scratch(equation), list(_launches(equation, None)))]
    return [_candidate(equation, kernel) for kernel in lowering.candidates(equation)]


def chosen(equation: Equation) -> Candidate:
    """The one that runs where nothing was measured.

    Raises:
        DeviceError: there is none.
    """
    found = candidates(equation)
    if found and not found[0].label:
        return found[0]
    return _candidate(equation, lowering.chosen(equation))


def kernel_files() -> dict[str, str]:
    """The text of each file of `kernels/cuda` by its path in there."""
    folder = asset_path("kernels") / "cuda"
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.cu*"))}


def machine_code(source: Source, capability: tuple[int, int]) -> bytes:
    """The cubin; compiled once and then found in the user's cache."""
    return compiler.cubin(source, compiler.architecture(capability))


def headers() -> Sequence[tuple[str, str]]:
    """Name and text of each header that sources may include."""
    return compiler._headers()


def compiled_with(headers: Sequence[tuple[str, str]], source: Source, capability: tuple[int, int]) -> bytes:
    """The cubin of a source with other headers than the package's; not cached.

    Raises:
        CudaCompilerError: NVRTC refuses it.
    """
    own = compiler._headers
    try:
        compiler._headers = lambda: tuple(headers)  # type: ignore[assignment]
        return compiler.compile_source(source, compiler.architecture(capability)).cubin
    finally:
        compiler._headers = own


def _candidate(equation: Equation, kernel: Kernel) -> Candidate:
    return Candidate(kernel.label, lowering.scratch(equation, kernel), list(_launches(equation, kernel)))


def _launches(equation: Equation, kernel: Kernel | None) -> Iterator[Launch]:
    for plan in lowering.launches(equation, kernel):
        assert isinstance(plan, LaunchPlan)
        source = plan.source
        generated, _, own = source.text.partition(f'#line 1 "{source.name}"\n')
        macros = [option[2:].partition("=") for option in source.options if option.startswith("-D")]
        assert not own or own == compiler.of_kernel(Source("", kernel_file(source.name)), plan.name).text
        yield Launch(
            plan.name,
            source.name,
            generated,
            {name: value for name, _, value in macros},
            [option for option in source.options if not option.startswith("-D")],
            plan.operands,
            plan.numbers,
            (plan.size.elements, plan.size.blocks, plan.size.threads, plan.size.shared),
            (plan.scratch, plan.checked),
            source,
        )


_texts: dict[str, str] = {}


def kernel_file(name: str) -> str:
    if not _texts:
        _texts.update(kernel_files())
    return _texts[name]
