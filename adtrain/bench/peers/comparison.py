"""Compares systems: first their results, then their times, in interleaved samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np

from adtrain.bench.machine import Protocol, protocol, thread_count
from adtrain.bench.op_table import OpCase
from adtrain.bench.peers.jobs import CHUNK, REPEATS
from adtrain.bench.peers.systems import ADTRAIN, Choice, Unsupported, WorkerFailed, WorkerProcess, precision_of
from adtrain.bench.sampling import Time, Timing, in_turns, ratio
from adtrain.bench.view import Ratio
from adtrain.core.precision import FULL


class Budget(NamedTuple):
    """Approximate seconds: of one sample, and of all samples of the slowest system."""

    sample: float
    system: float


STEPS, OPERATIONS = Budget(0.1, 6.0), Budget(0.02, 1.0)
MIN_ROUNDS, MAX_ROUNDS = 9, 21

LOSS_TOLERANCE = {"float32": 1e-3, "float64": 1e-6, "tf32": 2e-2, "bfloat16": 1e-1}
"""Relative tolerance of the first losses, by precision: rounding in another order adds up over steps."""

OPERATION_TOLERANCE = {FULL: 1e-5, "tf32": 5e-3, "bfloat16": 3e-2}
"""Relative tolerance of an operation's result against float64, by its precision."""


class Losses(NamedTuple):
    """The first losses of systems; the fields are those of `Systems`."""

    off: dict[str, float]
    different: list[str]
    skipped: dict[str, str]
    failed: dict[str, str]


@dataclass(frozen=True)
class PeerRatio(Ratio):
    """A peer's time over adtrain's, round by round; also the 20th and the 80th percentile."""

    p20: float
    p80: float


@dataclass(frozen=True, kw_only=True)
class Systems:
    """The systems compared, each mapping by system name.

    Attributes:
        times: of one step, or of one run of an operation.
        ratios: of the peers that compute the same as adtrain.
        peak_mib: peak resident memory of the system's process.
        off: relative errors, of losses against adtrain's, or of an operation's result against float64.
        different: systems whose error is above the tolerance; they get no ratio.
        skipped: systems without a counterpart, and what they lack.
        failed: systems that failed, and why.
    """

    precision: str
    tolerance: float
    times: dict[str, Time]
    ratios: dict[str, PeerRatio]
    peak_mib: dict[str, float]
    off: dict[str, float]
    different: list[str]
    skipped: dict[str, str]
    failed: dict[str, str]


def step_times(
    workers: Mapping[str, WorkerProcess], losses: Losses, precision: str, budget: Budget | None = None
) -> Systems:
    """The times of the training steps whose first losses were compared."""
    return _timed(workers, losses, budget or STEPS, CHUNK, precision, LOSS_TOLERANCE[precision])


def compare_losses(
    workers: Mapping[str, WorkerProcess],
    choice: Choice,
    name: str,
    overrides: Sequence[str],
    precision: str,
    do: str = "step",
) -> Losses:
    """The first losses of a config's training, or with "members" of its sweep.

    They are compared up to the first step whose loss in adtrain is above twice that of step 1. Such a training
    diverges, so its rounding errors grow with each later step.

    Raises WorkerFailed if adtrain itself cannot run it.
    """
    answers, skipped, failed = _set_up(workers, choice, {"do": do, "config_name": name, "overrides": list(overrides)})
    losses = {name: np.array(answer["losses"]) for name, answer in answers.items()}
    above = (losses[ADTRAIN] > 2 * losses[ADTRAIN][0]).reshape(len(losses[ADTRAIN]), -1).any(axis=1)
    steps = int(above.argmax()) + 1 if above.any() else len(above)
    losses = {name: found[:steps] for name, found in losses.items()}
    off = {name: float(np.max(np.abs(found / losses[ADTRAIN] - 1))) for name, found in losses.items()}
    return Losses(off, _above({name: loss_tolerance(name, precision) for name in off}, off), skipped, failed)


def loss_tolerance(system: str, precision: str) -> float:
    """The relative tolerance of a system's first losses for a config of that precision."""
    return LOSS_TOLERANCE[precision_of(system, precision)]


def compare_operation(workers: Mapping[str, WorkerProcess], choice: Choice, case: OpCase, phase: str) -> Systems:
    """An operation. Its result must be close to the float64 result; see `operations`.

    Raises:
        WorkerFailed: adtrain itself cannot run it.
    """
    answers, skipped, failed = _set_up(workers, choice, {"do": "operation", "case": case.name, "phase": phase})
    off, tolerance = {name: answer["error"] for name, answer in answers.items()}, OPERATION_TOLERANCE[case.precision]
    losses = Losses(off, _above(dict.fromkeys(off, tolerance), off), skipped, failed)
    return _timed(workers, losses, OPERATIONS, dict.fromkeys(CHUNK, REPEATS), case.precision, tolerance)


def _above(tolerances: Mapping[str, float], errors: Mapping[str, float]) -> list[str]:
    """The systems with an error above the tolerance, or NaN."""
    return [name for name, error in errors.items() if not error <= tolerances[name]]


def _set_up(
    workers: Mapping[str, WorkerProcess], choice: Choice, request: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Send the request to all workers. Returns the answers, and why systems were skipped or failed."""
    answers, skipped, failed = {}, dict(choice.skipped), {}
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
    all_workers: Mapping[str, WorkerProcess],
    found: Losses,
    budget: Budget,
    runs_per_call: Mapping[str, int],
    precision: str,
    tolerance: float,
) -> Systems:
    """Times of one run of each system that has an error, in interleaved samples. `runs_per_call` is by device."""
    workers = {name: all_workers[name] for name in found.off}
    seconds = {name: worker.ask("time", calls=1)["seconds"] for name, worker in workers.items()}
    calls = {name: max(1, round(budget.sample / each)) for name, each in seconds.items()}
    repeats = {name: calls[name] * runs_per_call[worker.device] for name, worker in workers.items()}
    slowest = max(each * (calls[name] + 1) for name, each in seconds.items())
    rounds = int(min(max(budget.system / slowest, MIN_ROUNDS), MAX_ROUNDS))
    samples = {name: partial(worker.ask, "time", calls=calls[name]) for name, worker in workers.items()}
    answers = in_turns(samples, rounds)
    times = {
        name: Timing([each["seconds"] / repeats[name] * 1e3 for each in answers[name]], repeats[name])
        for name in workers
    }
    peers = [name for name in workers if not {ADTRAIN, name} & set(found.different) and name != ADTRAIN]
    ratios = {name: ratio(times[name], times[ADTRAIN]).record() for name in peers}
    return Systems(
        precision=precision,
        tolerance=tolerance,
        times={name: timing.record() for name, timing in times.items()},
        ratios={name: PeerRatio(x.median_ms, x.low_ms, x.high_ms, x.p20_ms, x.p80_ms) for name, x in ratios.items()},
        peak_mib={name: answers[name][-1]["peak_mib"] for name in workers},
        **found._asdict(),
    )


def conditions(device: str, load: float | None, choice: Choice) -> Protocol:
    """The protocol, with threads and the versions of the peers."""
    found = protocol(device, load)
    versions = {package: version(package) for package in {peer.package for peer in choice.runnable}}
    return replace(found, threads=thread_count(), versions=found.versions | versions)
