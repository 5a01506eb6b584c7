"""Sides compared: first what they compute, then, if that is the same, how long they take, in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from adtrain.bench.peers.catalogue import OURS
from adtrain.bench.peers.op_cases import REPEATS, OpCase
from adtrain.bench.peers.sides import Side, SideFailed, SideSkips
from adtrain.bench.peers.steps import CHUNK
from adtrain.bench.timing.sampling import Timing, ratio
from adtrain.core.precision import FULL


class Pace(NamedTuple):
    """About how many seconds a sample of a side takes, and all samples of the slowest side."""

    sample: float
    side: float


STEPS, OPERATIONS = Pace(0.1, 6.0), Pace(0.02, 1.0)
MIN_ROUNDS, MAX_ROUNDS = 9, 21

LOSS_TOLERANCE = {"float32": 1e-3, "float64": 1e-6, "tf32": 2e-2, "bfloat16": 1e-1}
"""Relative, of the losses of the first steps, by the config's precision: sums in another order drift apart."""

OPERATION_TOLERANCE = {FULL: 1e-5, "tf32": 5e-3, "bfloat16": 3e-2}
"""Relative, of an operation's result to float64, by its precision."""


class Found(NamedTuple):
    """A comparison.

    Attributes:
        times: of one step, or one run of an operation, by side.
        peak_mib: the largest resident size of each side's process, by side.
        off: how far each side's result is from what it is compared with.
        different: the sides for which that is too far; their ratios are not told.
        skipped, failed: why sides did not take part, by side.
    """

    times: Mapping[str, Timing]
    peak_mib: Mapping[str, float]
    off: Mapping[str, float]
    different: Sequence[str]
    skipped: Mapping[str, str]
    failed: Mapping[str, str]

    @property
    def ratios(self) -> dict[str, Timing]:
        """How many times adtrain's time each other side takes that computes the same, round by round."""
        if OURS in self.different:
            return {}
        others = [name for name in self.times if name != OURS and name not in self.different]
        return {name: ratio(self.times[name], self.times[OURS]) for name in others}

    def record(self) -> dict[str, Any]:
        """For programs. `ratios` have no unit: median, 95% confidence interval, 20th and 80th percentile."""
        return {
            "times": {name: found.record() for name, found in self.times.items()},
            "ratios": {name: _ratio_record(found) for name, found in self.ratios.items()},
            "peak_mib": dict(self.peak_mib),
            "off": dict(self.off),
            "different": list(self.different),
            "skipped": dict(self.skipped),
            "failed": dict(self.failed),
        }


def compare_steps(sides: Mapping[str, Side], name: str, overrides: Sequence[str], precision: str) -> Found:
    """The training steps of a config, whose first losses must agree with adtrain's; see `steps`.

    Raises:
        SideFailed: adtrain's own side cannot take them.
    """
    question = {"do": "step", "config_name": name, "overrides": list(overrides)}
    answers, skipped, failed = _answers(sides, question)
    losses = {side: np.array(answer["losses"]) for side, answer in answers.items()}
    off = {side: float(np.max(np.abs(found / losses[OURS] - 1))) for side, found in losses.items()}
    return _compared(sides, off, LOSS_TOLERANCE[precision], skipped, failed, STEPS, CHUNK)


def compare_operation(sides: Mapping[str, Side], case: OpCase, phase: str) -> Found:
    """An operation, whose result must be near that in float64; see `operations`.

    Raises:
        SideFailed: adtrain's own side cannot run it.
    """
    question = {"do": "operation", "case": case.name, "phase": phase}
    answers, skipped, failed = _answers(sides, question)
    errors = {name: answer["error"] for name, answer in answers.items()}
    runs = dict.fromkeys(CHUNK, REPEATS)
    return _compared(sides, errors, OPERATION_TOLERANCE[case.precision], skipped, failed, OPERATIONS, runs)


def _compared(
    sides: Mapping[str, Side],
    off: Mapping[str, float],
    tolerance: float,
    skipped: Mapping[str, str],
    failed: Mapping[str, str],
    pace: Pace,
    runs: Mapping[str, int],
) -> Found:
    """Those sides timed whose results are known; `runs` says by device how many a call holds."""
    different = [name for name, x in off.items() if not x <= tolerance]
    times, peaks = _in_turns({name: sides[name] for name in off}, pace, runs)
    return Found(times, peaks, off, different, skipped, failed)


def _answers(
    sides: Mapping[str, Side], question: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """The answers of the sides, which get ready all at once; and why others do not answer: skipped, failed."""
    answers, skipped, failed = {}, {}, {}
    for side in sides.values():
        side.tell(**question)
    for name, side in sides.items():
        try:
            answers[name] = side.answer()
        except SideSkips as reason:
            skipped[name] = str(reason)
        except SideFailed as reason:
            if name == OURS:
                raise
            failed[name] = str(reason)
    return answers, skipped, failed


def _in_turns(
    sides: Mapping[str, Side], pace: Pace, runs: Mapping[str, int]
) -> tuple[dict[str, Timing], dict[str, float]]:
    """Rounds of a sample of each side, each begun by another one; and the memory that they have needed by then."""
    names = list(sides)
    took = {name: side.ask("time", calls=1)["seconds"] for name, side in sides.items()}
    calls = {name: max(1, round(pace.sample / seconds)) for name, seconds in took.items()}
    slowest = max(seconds * (calls[name] + 1) for name, seconds in took.items())
    rounds = int(min(max(pace.side / slowest, MIN_ROUNDS), MAX_ROUNDS))
    ms: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, float] = {}
    for first in range(rounds):
        for i in range(len(names)):
            name = names[(first + i) % len(names)]
            found = sides[name].ask("time", calls=calls[name])
            ms[name].append(found["seconds"] / (calls[name] * runs[sides[name].device]) * 1e3)
            peaks[name] = found["peak_mib"]
    repeats = {name: calls[name] * runs[sides[name].device] for name in names}
    return {name: Timing(ms[name], repeats[name]) for name in names}, peaks


def _ratio_record(found: Timing) -> dict[str, float]:
    low, high = found.interval_ms
    return {"median": found.median_ms, "low": low, "high": high, "p20": found.p20_ms, "p80": found.p80_ms}
