"""Every candidate kernel on the GPU for NVIDIA's compute-sanitizer: of the case table, and of larger arguments.

    run="python tests/sanitize_cases.py"
    $run --compile
    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 $run --part 1/16    # to 16/16
    compute-sanitizer --tool racecheck --error-exitcode 1 $run --part 1/16
    compute-sanitizer --tool racecheck --error-exitcode 1 $run --only attention

--compile fills the cache of kernels, in as many processes as there are processors, so that nothing is compiled under
the sanitizer. Parts may run at the same time. A part that takes longer than --seconds leaves out the rest, says so and
fails: divide into more parts then.

A part runs some Programs of `cuda_samples`, all but the large ones, as traced and after the passes: each as a CUDA
graph, and before that equation by equation with every candidate. A candidate is left out where another Program has the
same launches. Each array has an allocation of its own, without the pool, so that memcheck sees accesses beside it.
Errors of the API are not reported, as cuda-bindings asks for functions that the driver may not have.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from time import monotonic
from typing import Any, NamedTuple

import click
from cuda_samples import all_candidates, programs
from program_samples import for_gpu

from adtrain.backends.cuda import compiler
from adtrain.backends.cuda.compiler import Source
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Candidate, Lowering
from adtrain.backends.cuda.tuner.autotune import Mode
from adtrain.core.array import array
from adtrain.core.backend import backend
from adtrain.core.primitive import Trait
from adtrain.core.program import Equation, Program

SECONDS = 140.0


class Run(NamedTuple):
    """A Program, as traced or after the passes, and the candidates, with launches, that no other run has."""

    name: str
    program: Program
    fresh: Mapping[Equation, Sequence[tuple[Candidate | None, Sequence[LaunchPlan]]]]

    @property
    def candidates(self) -> int:
        return sum(map(len, self.fresh.values()))


def runs(lowering: Lowering) -> list[Run]:
    """Each Program as traced and after the passes. Those with most candidates come first, so that parts are alike."""
    seen: set[Hashable] = set()
    found = []
    for name, (traced, _) in programs(large=False).items():
        for program in (traced, for_gpu(traced, lowering.target)):
            fresh = {e: list(fresh_candidates(lowering, e, seen)) for e in dict.fromkeys(program.equations)}
            found.append(Run(name, program, fresh))
    return sorted(found, key=lambda run: run.candidates, reverse=True)


def fresh_candidates(
    lowering: Lowering, equation: Equation, seen: set[Hashable]
) -> Iterator[tuple[Candidate | None, Sequence[LaunchPlan]]]:
    """The candidates whose launches are not in ``seen``, and these; None stands for a generated kernel."""
    for kernel, launches in all_candidates(lowering, equation):
        key = tuple((x.source, x.name, x.numbers, x.size) for x in launches)
        if key and key not in seen:
            seen.add(key)
            yield kernel, launches


def compile_all(lowering: Lowering, architecture: str) -> int:
    """Fill the cache. Returns the number of sources."""
    needed: dict[Source, None] = {}
    for run in runs(lowering):
        for equation in run.fresh:
            for _, launches in all_candidates(lowering, equation):
                needed |= {launch.source: None for launch in launches}
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:  # without this process's CUDA context
        list(pool.map(partial(compiler.cubin, target=architecture), needed, chunksize=4))
    return len(needed)


def execute(gpu: Any, run: Run) -> None:
    """Run the fresh candidates on the values that the Program has for them, and then the Program."""
    constants = {v: array(x.numpy(), device="gpu") for v, x in run.program.constants.items()}
    program = replace(run.program, constants=constants)
    inputs = [gpu.from_numpy(x) for x in programs(large=False)[run.name].arguments()]
    values = dict(zip(program.inputs, inputs, strict=True)) | {v: x.buffer for v, x in constants.items()}
    for e in program.equations if run.candidates else ():
        given = [values[v] for v in e.inputs]
        for kernel in (*(kernel for kernel, _ in run.fresh[e]), None):
            results = compute(gpu, e, kernel, given)
        values |= dict(zip(e.outputs, results, strict=True))
    gpu.compile(program).run(inputs)
    gpu.device.synchronize()


def compute(gpu: Any, equation: Equation, kernel: Candidate | None, inputs: Sequence[Any]) -> Sequence[Any]:
    """The outputs by this candidate, or by the one that runs where nothing is measured."""
    from adtrain.backends.cuda.runtime.launch import Runnable

    (first, *_) = equation.outputs
    if equation.has(Trait.RESHAPE):
        return [type(inputs[0])(inputs[0].memory, first.type.shape, first.type.dtype)]
    work = Runnable(gpu.device, gpu.lowering, equation, kernel)
    outputs = [gpu.empty(v.type) for v in equation.outputs]
    scratch = gpu.device.allocate(work.scratch)
    work.enqueue([b.address for b in (*inputs, *outputs)], int(scratch), gpu.device.flags.address)
    gpu.device.synchronize()
    return outputs


def allocate_singly(device: Any) -> None:
    """Give each buffer of the GPU an allocation of exactly its size."""
    import pycuda.driver as cuda

    device.allocate = lambda size: cuda.mem_alloc(max(size, 1))


@click.command()
@click.option("--part", default="1/1", show_default=True, help="Every N-th Program, from the I-th.")
@click.option("--seconds", default=SECONDS, show_default=True, help="Start no further Program after this time.")
@click.option("--only", default="", help="Only Programs whose name contains this.")
@click.option("--compile", "only_compile", is_flag=True, help="Fill the cache of kernels, and run nothing.")
def main(part: str, seconds: float, only: str, only_compile: bool) -> None:
    """Run every candidate."""
    started, gpu = monotonic(), backend("gpu")
    device, lowering = gpu.device, gpu.lowering  # type: ignore[attr-defined]
    lowering.libraries = ()
    gpu.tuner.mode = Mode.OFF  # type: ignore[attr-defined]
    if only_compile:
        click.echo(f"{compile_all(lowering, device.architecture)} sources compiled")
        return
    allocate_singly(device)
    first, of = map(int, part.split("/"))
    mine = [run for run in runs(lowering) if only in run.name][first - 1 :: of]
    done = 0
    while done < len(mine) and monotonic() - started < seconds:
        execute(gpu, mine[done])
        done += 1
    candidates, left = sum(run.candidates for run in mine[:done]), len(mine) - done
    took = monotonic() - started
    click.echo(f"part {part}: {candidates} candidates in {done} programs, {left} programs left out, {took:.0f} s")
    if left:
        raise SystemExit(3)


if __name__ == "__main__":
    main()
