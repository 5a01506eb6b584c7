"""Every kernel for GPUs compiles for every architecture; that takes NVRTC, and no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import pytest
from program_samples import ON_GPU, OPTIMIZERS, training_program, two_updates, update_arguments
from test_cpu_programs import values_and_gradients

from adtrain.backends.cuda import compiler
from adtrain.backends.cuda.compiler import ARCHITECTURES, CudaCompilerError, Source
from adtrain.backends.cuda.lower import LaunchPlan, Lowering
from adtrain.cases import CASES
from adtrain.core.fused import members
from adtrain.core.program import Program
from adtrain.core.staging import stage
from adtrain.core.target import H200

pytestmark = pytest.mark.needs_nvrtc

FOR_ALL_RUNS = ("90a",)
"""The architectures that plain pytest compiles for, of ARCHITECTURES; each takes a minute."""
FEW = 2
"""Combinations of tunables that each file and element type is compiled with."""


class Sample(NamedTuple):
    """A source, and what it was made for: each primitive in it, with the type that it is computed in."""

    source: Source
    contents: frozenset[tuple[str, ...]]


def samples_of(program: Program) -> Iterator[Sample]:
    for equation in program.equations:
        dtype = equation.outputs[0].type.dtype.name
        contents = frozenset((equation.primitive.name, member, dtype) for member in members(equation))
        launches = (task for task in Lowering(H200).launches(equation) if isinstance(task, LaunchPlan))
        yield from (Sample(task.source, contents) for task in launches if not task.size.empty)


def all_samples() -> Iterator[Sample]:
    """What the case table needs, fused and unfused, with gradients; and steps of training."""
    for dtype in ("float32", "float64"):
        for length in (512, 64):
            yield from samples_of(stage(two_updates, ON_GPU).program(*update_arguments(length, dtype)))
        for case in CASES:
            for passes in ((), ON_GPU):
                program = stage(lambda *xs, case=case: tuple(values_and_gradients(case, xs)), passes).program(
                    *case.sample(dtype)
                )
                yield from samples_of(program)
        for optimizer in OPTIMIZERS:
            yield from samples_of(training_program(optimizer, dtype, ON_GPU))


@cache
def sources() -> list[Source]:
    """Loops, each file for each element type with FEW combinations of tunables, and of other generated kernels those
    that have something new in them."""
    kinds: dict[Any, dict[Source, None]] = {}
    seen: set[tuple[str, ...]] = set()
    for source, contents in all_samples():
        if source.name == "loops.cu":
            kind: Any = source.text
        elif "#line" in source.text and "EPILOGUE" not in source.text.partition("#line")[0]:
            kind = source.name, source.text.partition("#line")[0]
        elif contents <= seen:
            continue
        else:
            kind = source.text
            seen |= contents
        kinds.setdefault(kind, {})[source] = None
    return [source for kind in kinds.values() for source in islice(kind, FEW)]


@pytest.mark.parametrize(
    "target",
    [pytest.param(x, marks=() if x in FOR_ALL_RUNS else pytest.mark.exhaustive) for x in ARCHITECTURES],
)
def test_every_kernel_compiles_and_spills_no_registers(target: str) -> None:
    def report(source: Source) -> list[str]:
        log = compiler.compile_source(source, target).log.splitlines()
        return [
            f"{source.name} {source.options}: {line}"
            for line in log
            if "spill" in line and " 0 bytes spill stores" not in line
        ]

    with ThreadPoolExecutor(4) as threads:
        assert [line for lines in threads.map(report, sources()) for line in lines] == []


def test_a_source_that_is_wrong_is_refused_with_the_compilers_message() -> None:
    with pytest.raises(CudaCompilerError, match=r"wrong\.cu does not compile for sm_80(.|\n)*undefined"):
        compiler.compile_source(Source("wrong.cu", "int f() { return missing; }"), "80")
