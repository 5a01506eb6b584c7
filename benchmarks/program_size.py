"""The time to make and compile a Program, by phase, for training steps of about 100, 1,000 and 10,000 equations.

python benchmarks/program_size.py [SIZE]... [--kind layers|chain] [--compile cpu|gpu]

Nothing is trained, and no GPU is needed. Two kinds of step: "layers" is a network of linear and relu layers, "chain" a
long elementwise function of one array. Seconds are processor time of all threads and compilers. The growth is that of
the time between the last two sizes, divided by that of the equations: 1 means linear. Compiled code is not taken from
the user's cache; the kernels that all Programs share are compiled before.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import click
import numpy as np

import adtrain as ad
from adtrain import nn, ops, optim, passes
from adtrain.backends.cpu.codegen import generate, workspace
from adtrain.backends.cpu.compiler import load
from adtrain.backends.cpu.fusions import cpu_fusions
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.compiler import Source, architecture, compile_source
from adtrain.backends.cuda.fusions import gpu_fusions
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Lowering
from adtrain.backends.cuda.runtime.layout import Layout
from adtrain.bench.machine import commit
from adtrain.core.program import Program
from adtrain.core.staging import Pass, stage
from adtrain.core.trace import phase
from adtrain.passes.plan_memory import plan_memory

SIZES = (100, 1_000, 10_000)
WIDTH, BATCH = 128, 128
LAYER, LINK = 15, 6
"""Equations of a step for each layer, and for each link of the chain."""

Step = Callable[..., Any]


def processor_seconds() -> float:
    """The processor time that this process and the compilers that it called have used."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return process_time() + children.ru_utime + children.ru_stime


class Clock:
    """Processor seconds of named phases, in the order in which they began first.

    Attributes:
        collecting: seconds of Python's garbage collector, which runs in any phase and is not part of its time.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.collecting = 0.0

    def now(self) -> float:
        return processor_seconds() - self.collecting

    def collected(self, event: str, about: dict[str, int]) -> None:
        """Called by the garbage collector when it starts and stops."""
        self.collecting += processor_seconds() * (1 if event == "stop" else -1)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = self.now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0) + self.now() - started


def layers_step(size: int, clock: Clock) -> tuple[Step, Sequence[Any]]:
    """A step of plain gradient descent for `size` / LAYER linear and relu layers, and its arguments."""
    hidden = [layer for _ in range(max(size // LAYER - 2, 1)) for layer in (nn.Linear(WIDTH), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(10))
    params, statistics = model.init((WIDTH,), np.random.default_rng(0), np.dtype("float32"))
    optimizer = optim.SGD(lr=0.1)

    def step(params: Any, state: Any, x: Any, labels: Any) -> Any:
        def loss(params: Any) -> Any:
            out, _ = model.forward(params, statistics, x, nn.Mode(training=True))
            return ops.cross_entropy(out, labels)

        value, gradient = _differentiated(loss, params, clock)
        with clock.phase("trace the update"), phase("update"):
            return *optimizer.update(params, gradient, state, ad.array(np.float32(0.1))), value

    x, labels = ad.array(np.zeros((BATCH, WIDTH), np.float32)), ad.array(np.zeros(BATCH, np.int64))
    return step, (params, optimizer.init(params), x, labels)


def chain_step(size: int, clock: Clock) -> tuple[Step, Sequence[Any]]:
    """A step of plain gradient descent for `size` / LINK times x -> sin(x) * w, and its arguments."""

    def step(weight: Any, x: Any) -> Any:
        def loss(weight: Any) -> Any:
            y = x
            for _ in range(max(size // LINK, 1)):
                y = ops.sin(y) * weight
            return ops.sum(y)

        value, gradient = _differentiated(loss, weight, clock)
        with clock.phase("trace the update"), phase("update"):
            return weight - 0.1 * gradient, value

    return step, [ad.array(np.ones((BATCH, WIDTH), np.float32)) for _ in range(2)]


STEPS: Mapping[str, Callable[[int, Clock], tuple[Step, Sequence[Any]]]] = {"layers": layers_step, "chain": chain_step}


def _differentiated(loss: Step, at: Any, clock: Clock) -> tuple[Any, Any]:
    """Value and gradient of `loss`, with the times of forward and backward pass."""
    with clock.phase("trace the forward pass"):
        value, pullback = ad.vjp(loss, at)
    with clock.phase("trace the backward pass"):
        return value, pullback(ops.ones_like(value))[0]


def measured(kind: str, size: int, compiled: Collection[str]) -> dict[str, Any]:
    """Seconds of each phase for one Program, and how many equations and how much code it has."""
    clock = Clock()
    gc.collect()
    gc.callbacks.append(clock.collected)
    step, arguments = STEPS[kind](size, clock)
    started = clock.now()
    program = stage(step, (), donate=(0,)).program(*arguments)
    clock.seconds["trace, the rest"] = clock.now() - started - sum(clock.seconds.values())
    found: dict[str, Any] = {"kind": kind, "equations": len(program.equations)}
    program = _improved(program, passes.SIMPLIFY, "", clock)
    cpu = _improved(program, cpu_fusions(), "CPU, ", clock)
    with clock.phase("CPU, plan_memory"):
        plan = plan_memory(cpu, workspace)
    with clock.phase("CPU, generate C"):
        generated = generate(cpu, plan)
    gpu, lowering = _improved(program, gpu_fusions(H200), "GPU, ", clock), Lowering(H200)
    with clock.phase("GPU, lower and generate CUDA"):
        launches = [launch for e in gpu.equations for launch in lowering.launches(e)]
    with clock.phase("GPU, plan repeated runs"):
        Layout(gpu, lowering)
    sources = {launch.source: None for launch in launches if isinstance(launch, LaunchPlan)}
    found |= {"cpu_equations": len(cpu.equations), "gpu_equations": len(gpu.equations), "launches": len(launches)}
    found |= {"c_lines": generated.text.count("\n"), "cuda_sources": len(sources)}
    if "cpu" in compiled:
        load("", generated.sources, ())
        with clock.phase("CPU, C compiler"):
            load(generated.text, generated.sources, ("run", "threads"))
    if "gpu" in compiled:
        with clock.phase("GPU, NVRTC"):
            _compile_cuda(sources)
    gc.callbacks.remove(clock.collected)
    return found | {"seconds": {**clock.seconds, "garbage collector": clock.collecting}}


def _improved(program: Program, improvements: Sequence[Pass], prefix: str, clock: Clock) -> Program:
    """The Program after the passes."""
    for improve in improvements:
        with clock.phase(prefix + getattr(improve, "func", improve).__name__):
            program = improve(program)
    return program


def _compile_cuda(sources: Iterable[Source]) -> None:
    def work(source: Source) -> None:
        compile_source(source, architecture(H200.capability))

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(work, sources))


def table(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each phase, with a column of seconds for each Program."""
    numbers = [name for name in found[0] if name not in ("kind", "seconds")]
    for name in numbers:
        yield f"{name:40}" + "".join(f"{one[name]:>11,}" for one in found)
    last = found[-2:]
    more = last[-1]["equations"] / last[0]["equations"]
    phases = dict.fromkeys(name for one in found for name in one["seconds"])
    for name in (*phases, "all"):
        times = [one["seconds"].get(name, sum(one["seconds"].values())) for one in found]
        growth = f"{times[-1] / times[-2] / more:11.2f}" if len(found) > 1 else ""
        yield f"{name:40}" + "".join(f"{seconds:11.4f}" for seconds in times) + growth


@click.command()
@click.argument("sizes", nargs=-1, type=int)
@click.option("--kind", "kinds", type=click.Choice(list(STEPS)), multiple=True, default=list(STEPS))
@click.option("--compile", "compiled", type=click.Choice(["cpu", "gpu"]), multiple=True, help="Run the compiler too.")
def main(sizes: tuple[int, ...], kinds: tuple[str, ...], compiled: tuple[str, ...]) -> None:
    """Print the seconds of each phase for training steps of about SIZES equations."""
    backend = ad.core.backend.backend("cpu")
    click.echo(f"python benchmarks/program_size.py {' '.join(sys.argv[1:])}".rstrip())
    click.echo(f"commit {commit()}; {backend.device_name()}, {os.cpu_count()} cores; {backend.compiler_name()}")
    with TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        for kind in kinds:
            found = [measured(kind, size, compiled) for size in sizes or SIZES]
            click.echo("\n".join(["", f"{kind:40}{'seconds':>{11 * len(found)}}     growth", *table(found)]))


if __name__ == "__main__":
    main()
