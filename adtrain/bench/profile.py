"""What steps do: the time of each operation, observed by a hook; their timeline; and the memory that they use.

A timeline is for Perfetto and chrome://tracing: in the Trace Event Format, JSON object form, complete events ("X") with
times in microseconds, and metadata ("M") that name processes and threads. Each mode of the step is a process; its
threads are the host and the device.
"""

from __future__ import annotations

import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from numpy.lib import tracemalloc_domain

from adtrain.bench import sampling
from adtrain.bench.sampling import Clock, Timing, rate, sample_seconds
from adtrain.core.backend import backend
from adtrain.core.primitive import Cost
from adtrain.core.program import Program, costs, label
from adtrain.core.trace import Call, Hook, hook
from adtrain.training import Experiment, continuation
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


def timed_step(run_steps: Callable[[int], object], clock: Clock = perf_counter) -> OpTimer:
    """Run a step, and time its operations."""
    timer = OpTimer(clock)
    with hook(timer):
        run_steps(1)
    return timer


MAX_REPEATS = 100
"""Limit of the steps in one sample."""


def profile_steps(
    run_steps: Callable[[int], object],
    steps: int,
    clock: Clock = perf_counter,
    device: str = "cpu",
    typical: Callable[[Iterable[float]], float] = median,
) -> OpsProfile:
    """Take `steps` samples of the end-to-end time without hooks, alternating with steps whose operations are timed.

    A sample has as many steps as `sampling.MIN_SAMPLE_MS` needs, and ends when the device has finished.

    Args:
        run_steps: called with n, it runs n steps; all must run the same primitives on the same shapes.
        device: where the steps run.
        typical: from the times of an operation in the samples to the one of its row. The minimum is that of the steps
            which other programs disturb least.

    Raises:
        ValueError: two steps ran different primitives.
    """
    finish = backend(device).synchronize
    for _ in range(sampling.WARMUP_RUNS):
        sample_seconds(run_steps, finish, 1, clock)
    repeats, _ = sampling.sample_length(run_steps, finish, clock, sampling.MIN_SAMPLE_MS, MAX_REPEATS)
    timers: list[OpTimer] = []

    def whole() -> float:
        return sample_seconds(run_steps, finish, repeats, clock) * 1e3 / repeats

    def by_operation() -> float:
        timers.append(timed_step(run_steps, clock))
        if timers[-1].totals != timers[0].totals:
            raise ValueError("profile_steps: two steps ran different primitives, expected the same in every step")
        return sum(timers[-1].seconds.values()) * 1e3

    samples = sampling.in_turns({"whole": whole, "by operation": by_operation}, steps)
    totals = timers[0].totals
    times = {key: typical(timer.seconds[key] for timer in timers) * 1e3 for key in totals}
    total = sum(times.values())
    rows = [
        OperationTime(
            *key,
            calls=totals[key].calls,
            ms=ms,
            share=ms / total if total > 0 else 0.0,
            flops=totals[key].flops,
            bytes=totals[key].bytes,
            gflops_per_s=rate(totals[key].flops, ms),
            gbytes_per_s=rate(totals[key].bytes, ms),
        )
        for key, ms in times.items()
    ]
    return OpsProfile(rows, Timing(samples["whole"], repeats))


HOST, DEVICE = 1, 2


class _Recorder(Hook):
    """Records the operations that run as events of a process, with times since its creation.

    The equations of a Program follow one another without gaps, and end when the host gets their times.
    """

    def __init__(self, pid: int, kernels: Mapping[Key, Sequence[str]]) -> None:
        self.pid, self.kernels = pid, kernels
        self.events: list[dict[str, Any]] = []
        self.start = perf_counter()

    def now(self) -> float:
        """Microseconds since the creation."""
        return (perf_counter() - self.start) * 1e6

    def before(self, call: Call) -> None:
        self.began = self.now()

    def after(self, call: Call) -> None:
        backend(call.device).synchronize()
        ended = self.now()
        cost = call.primitive.cost(call.args, call.params)
        self.add((call.primitive.name, call.scope, call.phase), self.began, ended - self.began, *cost)

    def program(self, program: Program, seconds: Sequence[float]) -> None:
        at = self.now() - sum(seconds) * 1e6
        for e, elapsed, cost in zip(program.equations, seconds, costs(program.equations), strict=True):
            if not e.primitive.view:
                self.add((label(e), e.scope, e.phase), at, elapsed * 1e6, *cost)
            at += elapsed * 1e6

    def add(self, key: Key, at: float, duration: float, flops: int, bytes: int) -> None:
        op, scope, phase = key
        args = {"scope": scope, "phase": phase, "flops": flops, "bytes": bytes}
        args["kernel"] = ", ".join(self.kernels.get(key, ()))
        self.events.append(event(self.pid, DEVICE, op, phase, at, duration, args))


def trace_step(
    pid: int, mode: str, run_steps: Callable[[int], object], kernels: Mapping[Key, Sequence[str]], device: str = "cpu"
) -> list[dict[str, Any]]:
    """Run one step and return its events. Run a step before, so that nothing is compiled in this one.

    Args:
        pid: the process that stands for the mode.
        run_steps: called with n, it runs n steps.
        kernels: names of the kernels of each operation.
    """
    finish = backend(device).synchronize
    finish()
    recorder = _Recorder(pid, kernels)
    with hook(recorder):
        run_steps(1)
    enqueued = recorder.now()
    finish()
    ended = recorder.now()
    names = {HOST: "host", DEVICE: f"device ({device})"}
    return [
        {"name": "process_name", "ph": "M", "pid": pid, "tid": HOST, "args": {"name": f"{mode} step"}},
        *({"name": "thread_name", "ph": "M", "pid": pid, "tid": t, "args": {"name": n}} for t, n in names.items()),
        event(pid, HOST, "step", "host", 0.0, enqueued, {}),
        event(pid, HOST, "wait", "host", enqueued, ended - enqueued, {}),
        *recorder.events,
    ]


def event(
    pid: int, tid: int, name: str, category: str, at: float, duration: float, args: Mapping[str, Any]
) -> dict[str, Any]:
    """A complete event; times in microseconds, a negative start becomes 0."""
    times = {"ts": max(at, 0.0), "dur": duration}
    return {"name": name, "cat": category, "ph": "X", **times, "pid": pid, "tid": tid, "args": dict(args)}


def held_bytes(experiment: Experiment, device: str) -> int | None:
    """Run steps and return the peak bytes of all arrays, data set included: on a GPU as this process has allocated them
    so far, on the CPU by tracing NumPy's allocations."""
    if device != "cpu":
        continuation(experiment, experiment.initial_state("cpu"), device)(2)
        backend(device).synchronize()
        return backend(device).allocated()
    splits = [split for split in (experiment.train, experiment.validation, experiment.test) if split is not None]
    data = sum(split.images.nbytes + split.labels.nbytes for split in splits)
    tracemalloc.start()
    try:
        run_steps = continuation(experiment, experiment.initial_state("cpu"), device)
        run_steps(1)
        arrays = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(True, tracemalloc_domain)])
        between = sum(trace.size for trace in arrays.traces)
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        run_steps(2)
        return data + between + tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
