"""The timeline of one training step for Perfetto and chrome://tracing.

In the Trace Event Format, JSON object form: complete events ("X") with times in microseconds, and metadata ("M") that
name processes and threads. Each mode of the step is a process; its threads are the host and the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from adtrain.bench.profile import Key
from adtrain.bench.timing.sampling import Clock
from adtrain.core.backend import backend
from adtrain.core.costs import costs
from adtrain.core.fused import label
from adtrain.core.hooks import Call, Hook, hook
from adtrain.core.program import Program

HOST, DEVICE = 1, 2


class _Recorder(Hook):
    """Records the operations that run as events of a process, with times since its creation.

    The equations of a Program follow one another without gaps, and end when the host gets their times.
    """

    def __init__(self, pid: int, kernels: Mapping[Key, Sequence[str]], clock: Clock) -> None:
        self.pid, self.kernels, self.clock = pid, kernels, clock
        self.events: list[dict[str, Any]] = []
        self.start = clock()

    def now(self) -> float:
        """Microseconds since the creation."""
        return (self.clock() - self.start) * 1e6

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
    pid: int,
    mode: str,
    run_steps: Callable[[int], object],
    kernels: Mapping[Key, Sequence[str]],
    device: str = "cpu",
    clock: Clock = perf_counter,
) -> list[dict[str, Any]]:
    """Run one step and return its events. Run a step before, so that nothing is compiled in this one.

    Args:
        pid: the process that stands for the mode.
        run_steps: called with n, it runs n steps.
        kernels: names of the kernels of each operation.
    """
    finish = backend(device).synchronize
    finish()
    recorder = _Recorder(pid, kernels, clock)
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
