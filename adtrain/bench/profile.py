"""The time of each operation of a step, by operation, layer and phase, observed by a hook."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import NamedTuple

from adtrain.bench.timing import sampling
from adtrain.bench.timing.sampling import Clock, Timing, rate
from adtrain.core.backend import backend
from adtrain.core.fused import label
from adtrain.core.hooks import Call, Hook, hook
from adtrain.core.primitive import Cost
from adtrain.core.program import Program
from adtrain.training.summary import OperationTime


@dataclass(frozen=True)
class OpsProfile:
    """A row for each operation, in the order of its first run, and the time of the whole step without hooks."""

    rows: list[OperationTime]
    step: Timing

    @property
    def ops_sum_ms(self) -> float:
        return sum(row.ms for row in self.rows)

    @property
    def step_ms(self) -> float:
        return self.step.median_ms


class Totals(NamedTuple):
    """The runs of a key's primitives in one step: their number, FLOPs and bytes."""

    calls: int = 0
    flops: int = 0
    bytes: int = 0


Key = tuple[str, str, str]
"""Operation, scope and phase."""


class OpTimer(Hook):
    """Sums up seconds and totals of the primitives that run, by key.

    Primitives that run alone are timed by the host, from the call of the backend until the device has finished;
    equations of a Program by the device.
    """

    def __init__(self, clock: Clock = perf_counter) -> None:
        self.clock = clock
        self.seconds: defaultdict[Key, float] = defaultdict(float)
        self.totals: dict[Key, Totals] = {}

    def before(self, call: Call) -> None:
        self.key = (call.primitive.name, call.scope, call.phase)
        self._count(self.key, call.primitive.cost(call.args, call.params))
        self.started = self.clock()

    def after(self, call: Call) -> None:
        backend(call.device).synchronize()
        self.seconds[self.key] += self.clock() - self.started

    def program(self, program: Program, seconds: Sequence[float]) -> None:
        for equation, elapsed in zip(program.equations, seconds, strict=True):
            key = (label(equation), equation.scope, equation.phase)
            self._count(key, equation.cost)
            self.seconds[key] += elapsed

    def _count(self, key: Key, cost: Cost) -> None:
        so_far = self.totals.get(key, Totals())
        self.totals[key] = Totals(so_far.calls + 1, so_far.flops + cost.flops, so_far.bytes + cost.bytes)


MAX_REPEATS = 100
"""Limit of the steps in one sample."""


def profile_steps(
    run_steps: Callable[[int], object],
    steps: int,
    warmup: int = 2,
    clock: Clock = perf_counter,
    device: str = "cpu",
) -> OpsProfile:
    """Take `steps` samples of the end-to-end time without hooks, alternating with steps whose operations are timed.

    A sample has as many steps as `sampling.MIN_SAMPLE_MS` needs, and ends when the device has finished.

    Args:
        run_steps: called with n, it runs n steps; all must run the same primitives on the same shapes.
        warmup: number of steps before the first sample.
        device: where the steps run.

    Raises:
        ValueError: `steps` is less than 1, or two steps ran different primitives.
    """
    if steps < 1:
        raise ValueError(f"profile_steps: steps is {steps}, expected at least 1")
    finish = backend(device).synchronize
    for _ in range(warmup):
        run_steps(1)
        finish()
    repeats, _ = sampling.sample_length(run_steps, finish, clock, sampling.MIN_SAMPLE_MS, MAX_REPEATS)
    whole: list[float] = []
    timers: list[OpTimer] = []
    for _ in range(steps):
        start = clock()
        run_steps(repeats)
        finish()
        whole.append(clock() - start)
        timers.append(OpTimer(clock))
        with hook(timers[-1]):
            run_steps(1)
        if timers[-1].totals != timers[0].totals:
            raise ValueError("profile_steps: two steps ran different primitives, expected the same in every step")
    totals = timers[0].totals
    ms = {key: median(timer.seconds[key] for timer in timers) * 1e3 for key in totals}
    total = sum(ms.values())
    return OpsProfile(
        [_row(key, totals[key], ms[key], total) for key in totals],
        Timing([seconds * 1e3 / repeats for seconds in whole], repeats),
    )


def _row(key: Key, totals: Totals, ms: float, total: float) -> OperationTime:
    op, scope, phase = key
    return OperationTime(
        op=op,
        scope=scope,
        phase=phase,
        calls=totals.calls,
        ms=ms,
        share=ms / total if total > 0 else 0.0,
        flops=totals.flops,
        bytes=totals.bytes,
        gflops_per_s=rate(totals.flops, ms),
        gbytes_per_s=rate(totals.bytes, ms),
    )
