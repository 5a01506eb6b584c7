"""The process of one side: `python -m adtrain.bench.peers.side NAME DEVICE THREADS AUTOTUNE`.

It reads questions, a line of JSON each, and answers each with {"answer": ...}, {"skips": reason} or {"failed": reason}:

    {"do": "step", "config_name": ..., "overrides": [...]}  get ready; the losses of the first steps
    {"do": "operation", "case": ..., "phase": ...}  get ready; the error against float64
    {"do": "time", "calls": N}  the seconds of so many calls of what is ready, and the process's peak memory

A call is `steps.CHUNK` training steps, or `operations.REPEATS` runs of an operation.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any, cast

from adtrain import config, training
from adtrain.bench.peers import operations, steps
from adtrain.bench.peers.catalogue import OURS
from adtrain.bench.peers.sides import SideSkips
from adtrain.bench.timing.sampling import LONG_S
from adtrain.core.backend import backend
from adtrain.core.errors import AdtrainError

PEAK_UNIT = 2**20 if sys.platform == "darwin" else 2**10
"""What ru_maxrss counts in, to MiB: bytes on macOS, else KiB."""

PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent is no more."""


class Worker:
    """One peer on one device, and what it is ready to do."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, device
        self.call: Callable[[int], float] | None = None
        self.seconds = 0.0

    def step(self, config_name: str, overrides: list[str]) -> dict[str, Any]:
        experiment = training.prepare(config.load(config_name, overrides))
        runner = steps.runner(self.name, steps.Job(experiment, self.device))
        losses = runner.losses()[: steps.COMPARED]
        if not all(map(math.isfinite, losses)):
            raise AdtrainError(f"{self.name}: found the losses {losses} of the first steps, expected finite numbers")
        runner.run(1)
        self.call = runner.run
        return {"losses": losses}

    def operation(self, case: str, phase: str) -> dict[str, Any]:
        found = operations.find(case, self.device)
        work = operations.work(self.name, found, phase, self.device)
        error = operations.error(found, phase, work)
        work.run(1)
        self.call = work.run
        return {"error": error}

    def time(self, calls: int) -> dict[str, Any]:
        assert self.call is not None, "it is not ready for anything"
        if self.seconds < LONG_S:
            self.call(-(-calls // 4))  # caches, clocks and threads have been elsewhere
        gc.disable()
        start = perf_counter()
        self.call(calls)
        self.seconds = perf_counter() - start
        gc.enable()
        return {"seconds": self.seconds, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / PEAK_UNIT}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        do = question.pop("do")
        if do != "time":
            self.call, self.seconds = None, 0.0  # its memory goes before more is taken
        try:
            return {"answer": getattr(self, do)(**question)}
        except SideSkips as reason:
            return {"skips": str(reason)}
        except AdtrainError as reason:
            return {"failed": str(reason)}
        except Exception as reason:
            return {"failed": f"{type(reason).__name__}: {reason}".splitlines()[0]}


def main(name: str, device: str, threads: str, autotune: str) -> None:
    """Answer until there are no more questions."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped process would else stay for ever
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(threads)])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    if (name, device) == (OURS, "gpu"):
        from adtrain.backends.cuda.tuner.autotune import Mode

        cast(Any, backend(device)).tuner.mode = Mode(autotune)
    worker = Worker(name, device)
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
