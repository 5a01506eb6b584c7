"""Compares systems: first their results, then their times, in interleaved samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np

from adtrain.bench.op_table import OpCase
from adtrain.bench.peers.jobs import CHUNK
from adtrain.bench.peers.operations import REPEATS
from adtrain.bench.peers.processes import Unsupported, WorkerFailed, WorkerProcess
from adtrain.bench.peers.systems import ADTRAIN, Choice
from adtrain.bench.timing.machine import thread_count
from adtrain.bench.timing.protocol import Protocol, protocol
from adtrain.bench.timing.sampling import Timing, in_turns, ratio
from adtrain.core.precision import FULL

Progress = Callable[[str], object]
"""Gets lines for the user."""


class Budget(NamedTuple):
    """Approximate seconds: of one sample, and of all samples of the slowest system."""

    sample: float
    system: float


STEPS, OPERATIONS = Budget(0.1, 6.0), Budget(0.02, 1.0)
MIN_ROUNDS, MAX_ROUNDS = 9, 21

LOSS_TOLERANCE = {"float32": 1e-3, "float64": 1e-6, "tf32": 2e-2, "bfloat16": 1e-1}
"""Relative tolerance of the first losses, by the config's precision: rounding in another order adds up over steps."""

OPERATION_TOLERANCE = {FULL: 1e-5, "tf32": 5e-3, "bfloat16": 3e-2}
"""Relative tolerance of an operation's result against float64, by its precision."""


class Losses(NamedTuple):
    """The first losses of systems; the fields are those of `Comparison`."""

    errors: Mapping[str, float]
    different: Sequence[str]
    skipped: Mapping[str, str]
    failed: Mapping[str, str]


class Comparison(NamedTuple):
    """The systems compared, each mapping by system name.

    Attributes:
        times: of one step, or of one run of an operation.
        peak_mib: peak resident memory of the system's process.
        errors: relative, of losses against adtrain's, or of an operation's result against float64.
        different: systems whose error is above the tolerance; they get no ratio.
        skipped: systems without a counterpart, and what they lack.
        failed: systems that failed, and why.
    """

    times: Mapping[str, Timing]
    peak_mib: Mapping[str, float]
    errors: Mapping[str, float]
    different: Sequence[str]
    skipped: Mapping[str, str]
    failed: Mapping[str, str]

    @property
    def ratios(self) -> dict[str, Timing]:
        """Each peer's time over adtrain's, round by round, where both compute the same."""
        if ADTRAIN in self.different:
            return {}
        peers = [name for name in self.times if name != ADTRAIN and name not in self.different]
        return {name: ratio(self.times[name], self.times[ADTRAIN]) for name in peers}


def compare_steps(
    workers: Mapping[str, WorkerProcess], name: str, overrides: Sequence[str], precision: str, do: str = "step"
) -> Comparison:
    """The training step of a config, or with "members" that of its sweep. The first losses must equal adtrain's.

    Raises:
        WorkerFailed: adtrain itself cannot run it.
    """
    errors, different, skipped, failed = compare_losses(workers, name, overrides, precision, do)
    times, peaks = _timed({name: workers[name] for name in errors}, STEPS, CHUNK)
    return Comparison(times, peaks, errors, different, skipped, failed)


def compare_losses(
    workers: Mapping[str, WorkerProcess], name: str, overrides: Sequence[str], precision: str, do: str = "step"
) -> Losses:
    """The first losses of a config's training. Raises WorkerFailed if adtrain itself cannot run it."""
    answers, skipped, failed = _set_up(workers, {"do": do, "config_name": name, "overrides": list(overrides)})
    losses = {name: np.array(answer["losses"]) for name, answer in answers.items()}
    errors = {name: float(np.max(np.abs(found / losses[ADTRAIN] - 1))) for name, found in losses.items()}
    return Losses(errors, _above(LOSS_TOLERANCE[precision], errors), skipped, failed)


def compare_operation(workers: Mapping[str, WorkerProcess], case: OpCase, phase: str) -> Comparison:
    """An operation. Its result must be close to the float64 result; see `operations`.

    Raises:
        WorkerFailed: adtrain itself cannot run it.
    """
    answers, skipped, failed = _set_up(workers, {"do": "operation", "case": case.name, "phase": phase})
    errors = {name: answer["error"] for name, answer in answers.items()}
    different = _above(OPERATION_TOLERANCE[case.precision], errors)
    times, peaks = _timed({name: workers[name] for name in errors}, OPERATIONS, dict.fromkeys(CHUNK, REPEATS))
    return Comparison(times, peaks, errors, different, skipped, failed)


def _above(tolerance: float, errors: Mapping[str, float]) -> list[str]:
    """The systems with an error above the tolerance, or NaN."""
    return [name for name, error in errors.items() if not error <= tolerance]


def _set_up(
    workers: Mapping[str, WorkerProcess], request: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Send the request to all workers. Returns the answers, and why systems were skipped or failed."""
    answers, skipped, failed = {}, {}, {}
    for worker in workers.values():
        worker.send(**request)
    for name, worker in workers.items():
        try:
            answers[name] = worker.receive()
        except Unsupported as reason:
            skipped[name] = str(reason)
        except WorkerFailed as reason:
            if name == ADTRAIN:
                raise
            failed[name] = str(reason)
    return answers, skipped, failed


def _timed(
    workers: Mapping[str, WorkerProcess], budget: Budget, runs_per_call: Mapping[str, int]
) -> tuple[dict[str, Timing], dict[str, float]]:
    """Times of one run in interleaved samples, and peak memory in MiB. `runs_per_call` is by device."""
    seconds = {name: worker.ask("time", calls=1)["seconds"] for name, worker in workers.items()}
    calls = {name: max(1, round(budget.sample / each)) for name, each in seconds.items()}
    repeats = {name: calls[name] * runs_per_call[worker.device] for name, worker in workers.items()}
    slowest = max(each * (calls[name] + 1) for name, each in seconds.items())
    rounds = int(min(max(budget.system / slowest, MIN_ROUNDS), MAX_ROUNDS))
    found = in_turns({name: partial(worker.ask, "time", calls=calls[name]) for name, worker in workers.items()}, rounds)
    times = {
        name: Timing([each["seconds"] / repeats[name] * 1e3 for each in found[name]], repeats[name]) for name in workers
    }
    return times, {name: found[name][-1]["peak_mib"] for name in workers}


def conditions(device: str, load: float | None, choice: Choice) -> Protocol:
    """The protocol, with threads and the versions of the peers."""
    found = protocol(device, load)
    versions = {package: version(package) for package in {peer.package for peer in choice.runnable}}
    return replace(found, threads=thread_count(), versions=found.versions | versions)
