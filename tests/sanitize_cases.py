"""The case table on the GPU for NVIDIA's compute-sanitizer: values and gradients, one by one and as fused Programs.

    python tests/sanitize_cases.py --compile
    compute-sanitizer --tool memcheck --report-api-errors no python tests/sanitize_cases.py [--part I/N]
    compute-sanitizer --tool racecheck python tests/sanitize_cases.py [--part I/N]

Parts may run at the same time. The first line compiles all kernels into the cache, in as many processes as there are
processors, so that nothing is compiled under the sanitizer. Each array has an allocation of its own, without the pool,
so that memcheck sees what lies beside it; errors of the API are left out, as cuda-bindings asks for functions that the
driver may not have.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import click
from test_cpu_programs import values_and_gradients

from adtrain.backends.cuda import compiler
from adtrain.backends.cuda.compiler import Source
from adtrain.backends.cuda.lower import LaunchPlan
from adtrain.cases import CASES, Case
from adtrain.core.backend import backend
from adtrain.core.staging import stage
from adtrain.passes import ALL

DTYPES = ("float32", "float64")
FORMS = ((), ALL)


def as_program(case: Case) -> Any:
    return lambda *xs: tuple(values_and_gradients(case, xs))


def sources(case: Case) -> set[Source]:
    """What the case needs."""
    found, lowering = set(), backend("gpu").lowering  # type: ignore[attr-defined]
    for dtype in DTYPES:
        for passes in FORMS:
            program = stage(as_program(case), passes).program(*(x.to("gpu") for x in case.sample(dtype)))
            for equation in program.equations:
                launches = (task for task in lowering.launches(equation) if isinstance(task, LaunchPlan))
                found |= {task.source for task in launches if not task.size.empty}
    return found


def compile_all() -> int:
    """Fill the cache; how many kernels there are."""
    architecture = backend("gpu").device.architecture  # type: ignore[attr-defined]
    needed = sorted(set().union(*map(sources, CASES)), key=repr)
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:  # without this one's context
        list(pool.map(partial(compiler.cubin, target=architecture), needed, chunksize=4))
    return len(needed)


def allocate_singly() -> None:
    """Give each buffer of the GPU an allocation of exactly its size."""
    import pycuda.driver as cuda

    device: Any = backend("gpu").device  # type: ignore[attr-defined]
    device.allocate = lambda size: cuda.mem_alloc(max(size, 1))


def run(cases: Iterator[Case]) -> int:
    """Run each case in each form and type; how many there were."""
    count = 0
    for case in cases:
        for dtype in DTYPES:
            given = [x.to("gpu") for x in case.sample(dtype)]
            for x in (*values_and_gradients(case, given), *stage(as_program(case), ALL)(*given)):
                x.numpy()
        count += 1
    return count


@click.command()
@click.option("--part", default="1/1", show_default=True, help="Every N-th case, from the I-th.")
@click.option("--compile", "only_compile", is_flag=True, help="Fill the cache of kernels, and run nothing.")
def main(part: str, only_compile: bool) -> None:
    """Run the case table."""
    if only_compile:
        click.echo(f"{compile_all()} kernels compiled")
        return
    first, of = map(int, part.split("/"))
    allocate_singly()
    click.echo(f"{run(iter(CASES[first - 1 :: of]))} cases, part {part}")


if __name__ == "__main__":
    main()
