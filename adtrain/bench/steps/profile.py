"""Where a step's time goes: each primitive timed at the one door, by operation, layer and phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import NamedTuple, TypedDict

from adtrain.bench.timing import sampling
from adtrain.bench.timing.sampling import Clock, Timing
from adtrain.core.backend import backend
from adtrain.core.fused import label
from adtrain.core.hooks import Call, Hook, hook
from adtrain.core.primitive import Cost
from adtrain.core.program import Program


class OpRow(TypedDict):
    """The runs of one primitive in one scope and phase: counts and sums are those of one step.

    `ms` is the median over steps, `share` its part of the sum over all rows. FLOPs and bytes are the primitive's own
    `cost`; rates are None where the clock saw no time pass.
    """

    op: str
    scope: str
    phase: str
    calls: int
    ms: float
    share: float
    flops: int
    bytes: int
    gflops_per_s: float | None
    gbytes_per_s: float | None


@dataclass(frozen=True)
class OpsProfile:
    """Rows in the order in which they first ran, and the time of the whole step without hooks."""

    rows: list[OpRow]
    step: Timing

    @property
    def ops_sum_ms(self) -> float:
        return sum(row["ms"] for row in self.rows)

    @property
    def step_ms(self) -> float:
        return self.step.median_ms

    @property
    def ratio(self) -> float:
        """The operations' part of the step; what is missing from 1 is Python between them."""
        return self.ops_sum_ms / self.step_ms


class Work(NamedTuple):
    """What a key's primitives did in one step."""

    calls: int = 0
    flops: int = 0
    bytes: int = 0


Key = tuple[str, str, str]


class OpTimer(Hook):
    """Sums up time and work of the primitives that run, by (name, scope, phase).

    Times are the host's, from the backend being asked until the device has finished.
    """

    def __init__(self, clock: Clock = perf_counter) -> None:
        self.clock = clock
        self.seconds: defaultdict[Key, float] = defaultdict(float)
        self.work: dict[Key, Work] = {}

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
            self._count(key, equation.primitive.cost([v.type for v in equation.inputs], equation.params))
            self.seconds[key] += elapsed

    def _count(self, key: Key, cost: Cost) -> None:
        so_far = self.work.get(key, Work())
        self.work[key] = Work(so_far.calls + 1, so_far.flops + cost.flops, so_far.bytes + cost.bytes)


MOST_IN_A_ROW = 100


def profile_steps(
    run_steps: Callable[[int], object],
    steps: int,
    warmup: int = 2,
    clock: Clock = perf_counter,
    device: str = "cpu",
) -> OpsProfile:
    """Take `steps` samples of the end-to-end time without hooks, alternating with steps whose operations are timed.

    Args:
        run_steps: takes so many steps in a row; all must run the same primitives on the same shapes.
        warmup: steps before the first that counts.
        device: where it runs. A sample is of as many steps in a row as sampling.MIN_SAMPLE_MS takes, and ends when the
            device has finished.

    Raises:
        ValueError: steps is less than 1, or a step did other work than the one before.
    """
    if steps < 1:
        raise ValueError(f"profile_steps: steps is {steps}, expected at least 1")
    finish = backend(device).synchronize
    for _ in range(warmup):
        run_steps(1)
        finish()
    repeats, _ = sampling.sample_length(run_steps, finish, clock, sampling.MIN_SAMPLE_MS, MOST_IN_A_ROW)
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
        if timers[-1].work != timers[0].work:
            raise ValueError("profile_steps: two steps did different work, so there is no time of one step")
    work = timers[0].work
    ms = {key: median(timer.seconds[key] for timer in timers) * 1e3 for key in work}
    total = sum(ms.values())
    return OpsProfile(
        [_row(key, work[key], ms[key], total) for key in work],
        Timing([seconds * 1e3 / repeats for seconds in whole], repeats),
    )


def rate(amount: float, ms: float) -> float | None:
    """Billions a second."""
    return amount / ms * 1e-6 if ms > 0 else None


def _row(key: Key, work: Work, ms: float, total: float) -> OpRow:
    op, scope, phase = key
    return {
        "op": op,
        "scope": scope,
        "phase": phase,
        "calls": work.calls,
        "ms": ms,
        "share": ms / total if total > 0 else 0.0,
        "flops": work.flops,
        "bytes": work.bytes,
        "gflops_per_s": rate(work.flops, ms),
        "gbytes_per_s": rate(work.bytes, ms),
    }
