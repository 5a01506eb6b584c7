"""The worker process of one system: `python -m adtrain.bench.peers.worker NAME DEVICE THREADS AUTOTUNE`.

It reads requests, one line of JSON each, and answers each with {"answer": ...}, {"unsupported": reason} or
{"failed": reason}:

    {"do": "step", "config_name": ..., "overrides": [...]}  set up training; answers the losses of the first steps
    {"do": "members", "config_name": ..., "overrides": [...]}  the same for the members of a sweep together
    {"do": "operation", "case": ..., "phase": ...}          set up an operation; answers its error against float64
    {"do": "race", "config_name": ..., "overrides": [...]}  train to the end; answers seconds and accuracy of each epoch
    {"do": "time", "calls": N}  run what is set up; answers the seconds of N calls and the process's peak memory

A call is `jobs.CHUNK` training steps, or `jobs.REPEATS` runs of an operation.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple, cast

import numpy as np

from adtrain import config, training
from adtrain.bench.op_table import cases
from adtrain.bench.peers import jobs
from adtrain.bench.peers.systems import ADTRAIN, Unsupported, made
from adtrain.bench.sampling import LONG_S
from adtrain.config import Config
from adtrain.core.backend import backend
from adtrain.core.errors import AdtrainError
from adtrain.data import DataSet

MAXRSS_UNITS_PER_MIB = 2**20 if sys.platform == "darwin" else 2**10
"""ru_maxrss counts bytes on macOS, KiB elsewhere."""

PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal that a process gets when its parent dies."""


class Raced(NamedTuple):
    """What trainings that differ in their seeds have in common: their config, their data, and what trains them."""

    config: Config
    data_set: DataSet
    racer: Callable[[jobs.Job], list[jobs.Checked]]


class Worker:
    """One system on one device, and the work that is set up."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, device
        self.call: Callable[[int], float] | None = None
        self.seconds = 0.0
        self.raced: Raced | None = None

    def step(self, config_name: str, overrides: list[str]) -> dict[str, Any]:
        job = jobs.Job(training.prepare(config.load(config_name, overrides)), self.device)
        return self._set_up(jobs.runner(self.name, job), job.compared)

    def members(self, config_name: str, overrides: list[str]) -> dict[str, Any]:
        job = jobs.members_job(config.load(config_name, overrides), self.device)
        return self._set_up(jobs.runner(self.name, job, "members"), job.compared)

    def _set_up(self, runner: jobs.Runner, compared: int) -> dict[str, Any]:
        losses = list(runner.losses()[:compared])
        if not np.isfinite(losses).all():
            raise AdtrainError(f"{self.name}: the first steps have the losses {losses}, expected finite numbers")
        runner.run(1)
        self.call = runner.run
        return {"losses": losses}

    def race(self, config_name: str, overrides: list[str]) -> dict[str, Any]:
        cfg = config.load(config_name, overrides)
        shared = cfg if cfg.data.validation else cfg.without_seed()  # the seed chooses the validation images
        before = self.raced if self.raced is not None and self.raced.config == shared else None
        data_set = training.read_ahead(cfg) if before is None else before.data_set
        job = jobs.Job(training.prepare(cfg, read=lambda: data_set), self.device)
        racer = made(self.name, "race", job) if before is None else before.racer
        self.raced = Raced(shared, data_set, racer)
        return {"epochs": racer(job)}

    def operation(self, case: str, phase: str) -> dict[str, Any]:
        found = next(each for each in cases(self.device) if each.name == case)
        runner: jobs.OpRunner = made(self.name, "operation", found, phase, self.device)
        error = jobs.operation_error(found, phase, runner)
        runner.run(1)
        self.call = runner.run
        return {"error": error}

    def time(self, calls: int) -> dict[str, Any]:
        assert self.call is not None, "no work is set up"
        if self.seconds < LONG_S:
            self.call(-(-calls // 4))  # warm-up: the process was stopped, and others used the caches and cores
        gc.disable()
        start = perf_counter()
        self.call(calls)
        self.seconds = perf_counter() - start
        gc.enable()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MAXRSS_UNITS_PER_MIB
        return {"seconds": self.seconds, "peak_mib": peak}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        do = request.pop("do")
        if do != "time":
            self.call, self.seconds = None, 0.0  # free the old work's memory before the new work allocates
        if do != "race":
            self.raced = None
        try:
            return {"answer": getattr(self, do)(**request)}
        except Unsupported as reason:
            return {"unsupported": str(reason)}
        except AdtrainError as reason:
            return {"failed": str(reason)}
        except Exception as reason:
            return {"failed": f"{type(reason).__name__}: {reason}".splitlines()[0]}


def main(name: str, device: str, threads: str, autotune: str, *, kind: type[Worker] = Worker) -> None:
    """Answer requests until stdin is closed, by a worker of this kind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped process would outlive its parent
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(threads)])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print on stdout must not mix with the answers
    if (name, device) == (ADTRAIN, "gpu"):
        from adtrain.backends.cuda.tuner.autotune import Mode

        cast(Any, backend(device)).tuner.mode = Mode(autotune)
    worker = kind(name, device)
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
