"""How long a config's own training step takes: end to end, and layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TypedDict

from adtrain.core.backend import backend
from adtrain.measure.profile import OpRow, OpsProfile, profile_steps, rate
from adtrain.measure.timing import WARMUP_RUNS, Clock

BUDGET_SECONDS = 6.0
MIN_STEPS, MAX_STEPS = 5, 50


class LayerTime(TypedDict):
    """One scope of a step: milliseconds by phase, its part of the sum over all scopes, and what it computes."""

    layer: str
    forward_ms: float
    backward_ms: float
    update_ms: float
    share: float
    flops: int
    bytes: int
    gflops_per_s: float | None
    gbytes_per_s: float | None


@dataclass(frozen=True)
class StepBench:
    """A training step: its operations, and how many images it trains on."""

    profile: OpsProfile
    images: int

    @property
    def images_per_second(self) -> float:
        return self.images / self.profile.step_ms * 1e3

    @property
    def layers(self) -> list[LayerTime]:
        return layer_times(self.profile.rows)


def bench_step(
    run_steps: Callable[[int], object], images: int, clock: Clock = perf_counter, device: str = "cpu"
) -> StepBench:
    """Profile as many steps as take about BUDGET_SECONDS.

    Args:
        run_steps: takes so many training steps in a row, each on `images` images.
        device: where it runs.
    """
    for _ in range(WARMUP_RUNS):
        start = clock()
        run_steps(1)
        backend(device).synchronize()
        seconds = clock() - start
    pairs = BUDGET_SECONDS / (2 * seconds) if seconds > 0 else MAX_STEPS
    steps = int(min(max(pairs, MIN_STEPS), MAX_STEPS))
    return StepBench(profile_steps(run_steps, steps, warmup=0, clock=clock, device=device), images)


def layer_times(rows: Sequence[OpRow]) -> list[LayerTime]:
    """The rows summed up by scope, in the order in which the scopes first ran."""
    scopes = dict.fromkeys(row["scope"] for row in rows)
    return [_layer(scope, [row for row in rows if row["scope"] == scope]) for scope in scopes]


def _layer(scope: str, rows: Sequence[OpRow]) -> LayerTime:
    def ms(phase: str) -> float:
        return sum(row["ms"] for row in rows if row["phase"] == phase)

    total = sum(row["ms"] for row in rows)
    flops, moved = sum(row["flops"] for row in rows), sum(row["bytes"] for row in rows)
    return {
        "layer": scope,
        "forward_ms": ms("forward"),
        "backward_ms": ms("backward"),
        "update_ms": ms("update"),
        "share": sum(row["share"] for row in rows),
        "flops": flops,
        "bytes": moved,
        "gflops_per_s": rate(flops, total),
        "gbytes_per_s": rate(moved, total),
    }
