"""How long a config's own training step takes: its layers, and end to end in each way that it can run, in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from time import perf_counter
from typing import Any

from adtrain.bench.steps.profile import Key, OpTimer, Work, rate
from adtrain.bench.timing.roofline import Roofline
from adtrain.bench.timing.sampling import Clock, Timing, alternate
from adtrain.core.backend import KernelRun, backend
from adtrain.core.costs import costs
from adtrain.core.fused import label
from adtrain.core.hooks import hook
from adtrain.core.staging import Staged
from adtrain.training import Experiment, Mode, continuation
from adtrain.training.memory import planned_peak

BUDGET_MS = 6000.0
"""How long the samples of a config take together, where the least number of them allows it."""

PAUSE_S = {"cpu": 0.04, "gpu": 0.0}
"""Between two modes: OpenBLAS's threads, which run eager steps, spin for about 30 ms before they leave their cores."""

SAMPLE_MS = 50.0
"""The least that a sample of steps takes. Training takes thousands in a row: the host's work every hundred steps hides
behind those before, and the threads of a CPU, which wake up on one core, have been spread by the scheduler."""

PHASES = ("forward", "backward", "update")


class Steps:
    """Steps on a device, to be timed whole, and in steps of their own operation by operation.

    Attributes:
        asked_ms: for each sample of `whole` how long the host was busy with a step.
        timers: for each sample of `parts` what the operations of each step did.
    """

    def __init__(self, take: Callable[[int], object], clock: Clock) -> None:
        self.take, self.clock = take, clock
        self.asked_ms: list[float] = []
        self.timers: list[Sequence[OpTimer]] = []

    def whole(self, times: int) -> None:
        start = self.clock()
        self.take(times)
        self.last_asked_ms = (self.clock() - start) * 1e3 / times

    def parts(self, times: int) -> None:
        self.last_timers = [OpTimer(self.clock) for _ in range(times)]
        for timer in self.last_timers:
            with hook(timer):
                self.take(1)

    def keep(self, part: str) -> None:
        """The last call of `whole` or `parts` was a sample."""
        if part == "whole":
            self.asked_ms.append(self.last_asked_ms)
        else:
            self.timers.append(self.last_timers)


@dataclass(frozen=True)
class ModeBench:
    """The step, run in one way.

    Attributes:
        step: end to end, without hooks.
        host: how long the host is busy with it: on a GPU until it has been asked for, on the CPU what the step takes
            beyond its operations.
        timers: the operations of each step of each round.
        kernels: what computes them; not known where they run one by one.
    """

    images: int
    step: Timing
    host: Timing
    timers: Sequence[Sequence[OpTimer]]
    kernels: Mapping[Key, Sequence[KernelRun]]

    @property
    def work(self) -> Mapping[Key, Work]:
        """What the operations of a step do, in the order in which they first ran."""
        return self.timers[0][0].work

    def of(self, keys: Sequence[Key]) -> Timing:
        """So many operations of a step together."""
        return operations(self.timers, keys)

    @property
    def parts(self) -> Timing:
        """All operations together."""
        return self.of(list(self.work))

    @property
    def ratio(self) -> float:
        """The operations' part of the step; what is missing from 1 the device waits for the host. Where operations that
        overlap in the step are timed apart it may be more than 1."""
        return self.parts.median_ms / self.step.median_ms


def bench_modes(experiment: Experiment, device: str = "cpu", clock: Clock = perf_counter) -> dict[str, ModeBench]:
    """The step of `experiment` in every mode: rounds of a sample of each, whole and by operation."""
    experiments = {mode.value: replace(experiment, mode=mode) for mode in Mode}
    steps = {name: Steps(continuation(e, e.initial_state(device), device), clock) for name, e in experiments.items()}
    works = {f"{name} {part}": getattr(each, part) for name, each in steps.items() for part in ("whole", "parts")}

    def keep(work: str) -> None:
        name, part = work.split()
        steps[name].keep(part)

    finish = backend(device).synchronize
    found = alternate(works, finish, clock, BUDGET_MS, SAMPLE_MS, PAUSE_S[device], keep)
    benches = {}
    for name, each in steps.items():
        whole, timers = found[f"{name} whole"], each.timers
        host = Timing(each.asked_ms, whole.repeats)
        if device == "cpu":
            parts = operations(timers, list(timers[0][0].work))
            host = Timing([a - b for a, b in zip(whole.ms, parts.ms, strict=True)], whole.repeats)
        kernels = _kernels(experiments[name])
        benches[name] = ModeBench(experiment.full_batch, whole, host, timers, kernels)
    return benches


def operations(timers: Sequence[Sequence[OpTimer]], keys: Sequence[Key]) -> Timing:
    """The times of some operations of a step together: a sample a round, the mean over its steps."""
    ms = [mean(sum(timer.seconds[key] for key in keys) for timer in steps) * 1e3 for steps in timers]
    return Timing(ms, len(timers[0]))


def bench_batches(experiments: Mapping[int, Experiment], peak: Roofline, device: str = "cpu") -> dict[str, Any]:
    """The fused step by batch size, in turn, for programs; planned memory in bytes."""
    finish = backend(device).synchronize
    works = {str(n): continuation(e, e.initial_state(device), device) for n, e in experiments.items()}
    found = {}
    timings = alternate(works, finish, budget_ms=BUDGET_MS, min_sample_ms=SAMPLE_MS)
    for (n, e), timing in zip(experiments.items(), timings.values(), strict=True):
        program = e.step_program(device)
        work = [Work(1, *cost) for cost in costs(program.equations)]
        found[str(n)] = {
            "step": timing.record(),
            "images_per_second": n / timing.median_ms * 1e3,
            "planned_bytes": planned_peak(e, device),
            **amounts(work, timing.median_ms, peak, e.config.training.precision),
        }
    return found


def record(bench: ModeBench, peak: Roofline, precision: str) -> dict[str, Any]:
    """For programs: the step, its layers and its operations."""
    whole, total = bench.step, bench.parts.median_ms
    work = [key for key, each in bench.work.items() if each.flops or each.bytes]  # views do nothing

    def of(keys: Sequence[Key], ms: float) -> dict[str, Any]:
        return amounts([bench.work[key] for key in keys], ms, peak, precision)

    def layers() -> Iterator[dict[str, Any]]:
        for scope in dict.fromkeys(scope for _, scope, _ in work):
            keys = [key for key in work if key[1] == scope]
            phases = {phase: [key for key in keys if key[2] == phase] for phase in PHASES}
            ms = bench.of(keys).median_ms
            times = {phase: bench.of(own).record() if own else None for phase, own in phases.items()}
            yield {"layer": scope, **times, "share": _share(ms, total), **of(keys, ms)}

    def ops() -> Iterator[dict[str, Any]]:
        for key in work:
            timing, about = bench.of([key]), dict(zip(("op", "scope", "phase"), key, strict=True))
            kernels = [kernel._asdict() for kernel in bench.kernels.get(key, ())]
            shared = {"calls": bench.work[key].calls, "share": _share(timing.median_ms, total), "kernels": kernels}
            yield {**about, "time": timing.record(), **shared, **of([key], timing.median_ms)}

    return {
        "step": whole.record(),
        "images_per_second": bench.images / whole.median_ms * 1e3,
        "host": bench.host.record(),
        "parts": bench.parts.record(),
        "parts_to_step": bench.ratio,
        "idle_share": max(0.0, 1.0 - bench.ratio),
        **of(work, whole.median_ms),
        "layers": list(layers()),
        "ops": list(ops()),
    }


def amounts(work: Sequence[Work], ms: float, peak: Roofline, precision: str) -> dict[str, Any]:
    """What is computed in so many milliseconds: sums, rates, and the share of the device's roofline."""
    flops, moved = sum(each.flops for each in work), sum(each.bytes for each in work)
    return {
        "flops": flops,
        "bytes": moved,
        "gflops_per_s": rate(flops, ms),
        "gbytes_per_s": rate(moved, ms),
        "of_roofline": peak.share(flops, moved, ms, precision) if ms > 0 else None,
    }


def _share(ms: float, total: float) -> float:
    return ms / total if total > 0 else 0.0


def _kernels(experiment: Experiment) -> Mapping[Key, Sequence[KernelRun]]:
    step = experiment.logged_step
    if not isinstance(step, Staged) or step.latest is None:
        return {}
    found: dict[Key, list[KernelRun]] = {}
    for e, kernels in zip(step.latest.program.equations, step.latest.executable.kernels, strict=True):
        found.setdefault((label(e), e.scope, e.phase), []).extend(kernels)
    return found
