"""Small training steps on the CPU beside other programs: on one thread, on all, and on the number that adtrain chooses.

    python benchmarks/busy_cores.py [--neighbours 0,1,2,4] [--rounds 4]

A neighbour is a process that keeps one core busy. Times are means, because a step that waits for a core takes many
times the median. `ratio` is that of the chosen number to the better of the two others.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter

import click
import numpy as np

from adtrain import grad, nn, ops, optim
from adtrain.backends.cpu.compiled_program import CompiledProgram
from adtrain.backends.cpu.threads import TeamSize
from adtrain.bench.sampling import in_turns
from adtrain.core.staging import stage
from adtrain.passes import ALL

STEPS = {"tiny": (8, 32), "small": (32, 128), "middle": (128, 512)}
"""Examples of a batch, and width of the hidden layer of a network from 784 inputs to 10 classes."""
SLICE_S = 0.3
"""The least seconds of a sample."""


class Fixed(TeamSize):
    """Always the same number of threads."""

    def ran(self, runs: int, seconds: float) -> None:
        self.runs = max(1, runs)


def program(batch: int, width: int) -> tuple[CompiledProgram, list[np.ndarray]]:
    """A compiled training step, and its arguments."""
    model = nn.Sequential(nn.Linear(width), nn.ReLU(), nn.Linear(10))
    params, _ = model.init((784,))
    optimizer = optim.Adam(1e-3)
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(batch, 784)).astype(np.float32), rng.integers(0, 10, batch)

    def step(params, state, images, labels):  # type: ignore[no-untyped-def]
        gradient = grad(lambda params: ops.cross_entropy(model(params, images), labels))(params)
        return optimizer.update(params, gradient, state)

    staged = stage(step, ALL, donate=(0, 1))
    found = CompiledProgram(staged.program(params, optimizer.init(params), images, labels))
    return found, [rng.random(v.stored[0]).astype(v.stored[1]) for v in found.program.inputs]


def run_slice(compiled: CompiledProgram, arguments: list[np.ndarray]) -> tuple[int, float]:
    """Run steps for at least SLICE_S. Returns their number and the seconds."""
    steps, started = 0, perf_counter()
    while perf_counter() - started < SLICE_S:
        compiled.run(arguments, times=20)
        steps += 20
    return steps, perf_counter() - started


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Start `count` processes that each keep a core busy, and end them afterwards."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measured(batch: int, width: int, rounds: int) -> dict[str, float]:
    """Mean milliseconds of a step on one thread, on all threads, and on the chosen number."""
    work: dict[str, Callable[[], tuple[int, float]]] = {}
    for name in ("one", "all", "chosen"):
        compiled, arguments = program(batch, width)
        if name != "chosen":
            compiled.team = Fixed(1 if name == "one" else compiled.team.size)
        work[name] = partial(run_slice, compiled, arguments)
    found = {name: samples[1:] for name, samples in in_turns(work, rounds + 1).items()}  # the first round adapts
    return {name: sum(s for _, s in x) / sum(n for n, _ in x) * 1e3 for name, x in found.items()}


@click.command()
@click.option("--neighbours", "counts", default="0,1,2,4", show_default=True, help="Numbers of busy neighbours.")
@click.option("--rounds", default=4, show_default=True, help="Slices of each step.")
def main(counts: str, rounds: int) -> None:
    """Measure and print a table, in milliseconds."""
    click.echo(f"{'step':8} {'busy':>4} {'one':>8} {'all':>8} {'chosen':>8} {'ratio':>6}")
    for count in map(int, counts.split(",")):
        with neighbours(count):
            for name, (batch, width) in STEPS.items():
                ms = measured(batch, width, rounds)
                ratio = ms["chosen"] / min(ms["one"], ms["all"])
                row = f"{ms['one']:8.4f} {ms['all']:8.4f} {ms['chosen']:8.4f} {ratio:6.2f}"
                click.echo(f"{name:8} {count:4} {row}")


if __name__ == "__main__":
    main()
