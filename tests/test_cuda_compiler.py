"""Every kernel for GPUs compiles for every architecture; that takes NVRTC, and no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import islice

import pytest
from program_samples import ALL
from test_cpu_programs import values_and_gradients

from adtrain.backends.cuda import compiler
from adtrain.backends.cuda.compiler import ARCHITECTURES, CudaCompilerError, Source
from adtrain.backends.cuda.flat import flattened
from adtrain.backends.cuda.tasks import tasks
from adtrain.cases import CASES
from adtrain.core.staging import stage

FEW = 2
"""Combinations of tunables that each file and element type is compiled with."""


@pytest.fixture(scope="module", autouse=True)
def nvrtc() -> None:
    try:
        compiler.version()
    except CudaCompilerError as error:
        pytest.skip(str(error))


def all_sources() -> Iterator[Source]:
    """What the case table needs, fused and unfused, with gradients."""
    for case in CASES:
        for dtype in ("float32", "float64"):
            for passes in ((), ALL):
                program = stage(lambda *xs, case=case: tuple(values_and_gradients(case, xs)), passes).program(
                    *case.sample(dtype)
                )
                for equation in flattened(program).program.equations:
                    yield from (task.source for task in tasks(equation) if not task.size.empty)


@cache
def sources() -> list[Source]:
    """Generated kernels, and each file for each element type with FEW combinations of tunables."""
    kinds: dict[tuple[str, str], dict[Source, None]] = {}
    for source in all_sources():
        kind = source.text if source.name == "loops.cu" else source.text.partition("#line")[0]
        kinds.setdefault((source.name, kind), {})[source] = None
    return [source for kind in kinds.values() for source in islice(kind, FEW)]


@pytest.mark.parametrize("target", ARCHITECTURES)
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
