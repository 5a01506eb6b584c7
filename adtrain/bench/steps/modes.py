"""Times a config's training step in each mode: end to end, by layer and by operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from time import perf_counter
from typing import Any

from adtrain.bench.analysis.limits import limits
from adtrain.bench.steps.profile import Key, OpTimer, Totals
from adtrain.bench.timing.roofline import Roofline
from adtrain.bench.timing.sampling import Clock, Timing, Workload, alternate, rate
from adtrain.core.backend import KernelRun, backend
from adtrain.core.costs import costs
from adtrain.core.fused import label
from adtrain.core.hooks import hook
from adtrain.core.staging import Staged
from adtrain.training import Experiment, Mode, continuation
from adtrain.training.costs import planned_peak

BUDGET_MS = 6000.0
"""Target for all samples of a config together."""

PAUSE_S = {"cpu": 0.04, "gpu": 0.0}
"""Pause between modes. The threads of OpenBLAS, which eager steps use, spin for about 30 ms after their work."""

SAMPLE_MS = 50.0
"""Minimum duration of a sample, so that it behaves like training, which runs thousands of steps: the host's work every
hundred steps overlaps with the steps before, and the scheduler has spread the CPU's threads over the cores."""

PHASES = ("forward", "backward", "update")


class TimedSteps:
    """Steps on a device, timed as a whole or operation by operation.

    Attributes:
        host_ms: for each sample of `whole`, the host's milliseconds a step until the step is enqueued.
        timers: for each sample of `by_operation`, a timer for each of its steps.
    """

    def __init__(self, run_steps: Callable[[int], object], clock: Clock) -> None:
        self.run_steps, self.clock = run_steps, clock
        self.host_ms: list[float] = []
        self.timers: list[Sequence[OpTimer]] = []

    def whole(self, times: int) -> None:
        start = self.clock()
        self.run_steps(times)
        self.last_host_ms = (self.clock() - start) * 1e3 / times

    def by_operation(self, times: int) -> None:
        self.last_timers = [OpTimer(self.clock) for _ in range(times)]
        for timer in self.last_timers:
            with hook(timer):
                self.run_steps(1)

    def sampled(self, workload: str) -> None:
        """Record the last call of `whole` or `by_operation`, which was a sample and not a warm-up."""
        if workload == "whole":
            self.host_ms.append(self.last_host_ms)
        else:
            self.timers.append(self.last_timers)


@dataclass(frozen=True)
class ModeBench:
    """The step in one mode.

    Attributes:
        images: the number of images in a step.
        step: end to end, without hooks.
        host: the host's time: on a GPU until the step is enqueued, on the CPU the step less its operations, or 0 where
            these take longer, because they are timed one after the other.
        timers: for each sample, a timer for each of its steps.
        kernels: the kernels of each operation; empty where operations run eagerly.
    """

    images: int
    step: Timing
    host: Timing
    timers: Sequence[Sequence[OpTimer]]
    kernels: Mapping[Key, Sequence[KernelRun]]

    @property
    def totals(self) -> Mapping[Key, Totals]:
        """Calls, FLOPs and bytes of each operation of a step, in the order of their first run."""
        return self.timers[0][0].totals

    def of(self, keys: Sequence[Key]) -> Timing:
        """The time of these operations of a step together."""
        return operations(self.timers, keys)

    @property
    def parts(self) -> Timing:
        """The time of all operations of a step together."""
        return self.of(list(self.totals))

    @property
    def ratio(self) -> float:
        """The operations' time over the step's. Below 1, the device waits for the host. It can be above 1, because
        operations that overlap in the step are timed one after the other."""
        return self.parts.median_ms / self.step.median_ms


def bench_modes(experiment: Experiment, device: str = "cpu", clock: Clock = perf_counter) -> dict[str, ModeBench]:
    """The step of `experiment` in every mode, whole and by operation, in interleaved samples."""
    experiments = {mode.value: replace(experiment, mode=mode) for mode in Mode}
    steps = {
        name: TimedSteps(continuation(e, e.initial_state(device), device), clock) for name, e in experiments.items()
    }
    workloads: dict[str, Workload] = {}
    for name, each in steps.items():
        workloads |= {f"{name} whole": each.whole, f"{name} by_operation": each.by_operation}

    def sampled(workload: str) -> None:
        name, what = workload.split()
        steps[name].sampled(what)

    finish = backend(device).synchronize
    found = alternate(workloads, finish, clock, BUDGET_MS, SAMPLE_MS, PAUSE_S[device], sampled)
    benches = {}
    for name, each in steps.items():
        whole, timers = found[f"{name} whole"], each.timers
        host = Timing(each.host_ms, whole.repeats)
        if device == "cpu":
            parts = operations(timers, list(timers[0][0].totals))
            host = Timing([max(a - b, 0.0) for a, b in zip(whole.ms, parts.ms, strict=True)], whole.repeats)
        kernels = _kernels(experiments[name])
        benches[name] = ModeBench(experiment.full_batch, whole, host, timers, kernels)
    return benches


def operations(timers: Sequence[Sequence[OpTimer]], keys: Sequence[Key]) -> Timing:
    """The time of these operations of a step together. A sample is the mean over its steps."""
    ms = [mean(sum(timer.seconds[key] for key in keys) for timer in steps) * 1e3 for steps in timers]
    return Timing(ms, len(timers[0]))


def bench_batches(experiments: Mapping[int, Experiment], peak: Roofline, device: str = "cpu") -> dict[str, Any]:
    """The fused step by batch size, in interleaved samples, as JSON values; planned memory in bytes."""
    finish = backend(device).synchronize
    workloads = {str(n): continuation(e, e.initial_state(device), device) for n, e in experiments.items()}
    found = {}
    timings = alternate(workloads, finish, budget_ms=BUDGET_MS, min_sample_ms=SAMPLE_MS)
    for (n, e), timing in zip(experiments.items(), timings.values(), strict=True):
        program = e.step_program(device)
        totals = [Totals(1, *cost) for cost in costs(program.equations)]
        found[str(n)] = {
            "step": timing.record(),
            "images_per_second": n / timing.median_ms * 1e3,
            "planned_bytes": planned_peak(e, device),
            **rates(totals, timing.median_ms, peak, e.config.training.precision),
        }
    return found


def record(bench: ModeBench, peak: Roofline, precision: str) -> dict[str, Any]:
    """JSON values: the step, its layers and its operations."""
    whole, total = bench.step, bench.parts.median_ms
    keys = [key for key, each in bench.totals.items() if each.flops or each.bytes]  # without views, which do nothing

    def rates_of(keys: Sequence[Key], ms: float) -> dict[str, Any]:
        return rates([bench.totals[key] for key in keys], ms, peak, precision)

    def layers() -> Iterator[dict[str, Any]]:
        for scope in dict.fromkeys(scope for _, scope, _ in keys):
            own = [key for key in keys if key[1] == scope]
            phases = {phase: [key for key in own if key[2] == phase] for phase in PHASES}
            ms = bench.of(own).median_ms
            times = {phase: bench.of(each).record() if each else None for phase, each in phases.items()}
            yield {"layer": scope, **times, "share": _share(ms, total), **rates_of(own, ms)}

    def ops() -> Iterator[dict[str, Any]]:
        for key in keys:
            timing, about = bench.of([key]), dict(zip(("op", "scope", "phase"), key, strict=True))
            kernels = [kernel._asdict() for kernel in bench.kernels.get(key, ())]
            shared = {"calls": bench.totals[key].calls, "share": _share(timing.median_ms, total), "kernels": kernels}
            yield {**about, "time": timing.record(), **shared, **rates_of([key], timing.median_ms)}

    return {
        "step": whole.record(),
        "images_per_second": bench.images / whole.median_ms * 1e3,
        "host": bench.host.record(),
        "parts": bench.parts.record(),
        "parts_to_step": bench.ratio,
        "idle_share": max(0.0, 1.0 - bench.ratio),
        **rates_of(keys, whole.median_ms),
        "layers": list(layers()),
        "ops": list(ops()),
    }


def rates(totals: Sequence[Totals], ms: float, peak: Roofline, precision: str) -> dict[str, Any]:
    """FLOPs and bytes, their rates over `ms` milliseconds, and the share of the device's roofline."""
    flops, moved = sum(each.flops for each in totals), sum(each.bytes for each in totals)
    return {
        "flops": flops,
        "bytes": moved,
        "gflops_per_s": rate(flops, ms),
        "gbytes_per_s": rate(moved, ms),
        **limits(flops, moved, ms, peak, precision)._asdict(),
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
