from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import training_runs

import adtrain as ad
from adtrain import training
from adtrain.backends.cpu.cpu_backend import CpuBackend
from adtrain.bench.profile import OpsProfile, profile_steps
from adtrain.bench.sampling import WARMUP_RUNS
from adtrain.core.trace import phase, scope
from adtrain.training.summary import OperationTime

MLP = "[linear: 16, relu, linear: 8, relu, linear: 3]"


class Machine:
    """A simulated clock that advances only when the backend runs a primitive, or the test changes it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> None:
        self.now = 0.0
        run = CpuBackend.run

        def timed(backend: CpuBackend, primitive: Any, *args: Any) -> Any:
            self.now += seconds[primitive.name]
            return run(backend, primitive, *args)

        monkeypatch.setattr(CpuBackend, "run", timed)

    def clock(self) -> float:
        return self.now


@pytest.fixture
def mlp(tmp_path: Path) -> OpsProfile:
    return profile_of(tmp_path, training.Mode.STAGED)


def profile_of(folder: Path, mode: training.Mode) -> OpsProfile:
    experiment = replace(training_runs.prepare(folder, layers=MLP), mode=mode)
    return profile_steps(training.continuation(experiment, experiment.initial_state("cpu")), 2)


def rows_of(profile: OpsProfile, **wanted: str) -> list[OperationTime]:
    return [row for row in profile.rows if wanted.items() <= vars(row).items()]


def test_three_linear_layers_have_three_matmuls_forward_and_five_backward(mlp: OpsProfile) -> None:
    calls = {(row.scope, row.phase): row.calls for row in rows_of(mlp, op="matmul")}
    assert calls == {
        ("0.linear", "forward"): 1, ("2.linear", "forward"): 1, ("4.linear", "forward"): 1,
        ("4.linear", "backward"): 2, ("2.linear", "backward"): 2, ("0.linear", "backward"): 1,
    }  # fmt: skip


def test_rows_name_scope_and_phase(mlp: OpsProfile) -> None:
    phases: dict[str, set[str]] = {}
    for row in mlp.rows:
        phases.setdefault(row.scope, set()).add(row.phase)
    layers = {"0.linear", "1.relu", "2.linear", "3.relu", "4.linear", "loss"}
    assert {scope for scope in phases if phases[scope] == {"forward", "backward"}} == layers
    assert {scope for scope in phases if "update" in phases[scope]} == {"optimizer"}
    assert phases["optimizer"] == {"update"}
    assert phases["input"] == phases["accuracy"] == {"forward"}


def test_flops_and_bytes_equal_the_cost_of_the_primitive(mlp: OpsProfile) -> None:
    (row,) = rows_of(mlp, op="matmul", scope="0.linear", phase="forward")
    batch, inputs, outputs = 16, 36, 16
    assert row.flops == 2 * batch * inputs * outputs
    assert row.bytes == 4 * (batch * inputs + inputs * outputs + batch * outputs)


def test_rows_of_a_fused_step_name_its_operations_and_layers(tmp_path: Path) -> None:
    fused, staged = (profile_of(tmp_path / mode.value, mode) for mode in (training.Mode.FUSED, training.Mode.STAGED))
    (row,) = rows_of(fused, scope="0.linear+1.relu", phase="forward")
    assert (row.op, row.calls) == ("matmul+add+relu", 1)
    (update,) = rows_of(fused, scope="0.linear+optimizer")
    assert (update.op.split("+")[0], update.phase) == ("matmul", "backward")
    assert sum(row.flops for row in fused.rows) == sum(row.flops for row in staged.rows)
    assert sum(row.bytes for row in fused.rows) < sum(row.bytes for row in staged.rows)


def test_rows_are_distinct_and_add_up(mlp: OpsProfile) -> None:
    assert len({(row.op, row.scope, row.phase) for row in mlp.rows}) == len(mlp.rows)
    assert sum(row.share for row in mlp.rows) == pytest.approx(1)
    assert mlp.ops_sum_ms == pytest.approx(sum(row.ms for row in mlp.rows))
    assert mlp.step_ms > 0


def test_times_are_medians_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {"exp": 0.002, "sin": 0.001})
    # two steps of warm-up, one to find the sample length, then in turns a step without and a step with hooks
    python = iter([9.0, 9.0, 0.005, 0.005, 8.0, 0.005, 7.0, 0.005, 0.005])
    x = ad.array(np.ones(4, np.float32))

    def step(times: int) -> None:
        machine.now += next(python)
        with scope("a"):
            ad.ops.exp(ad.ops.exp(x))
        with scope("b"), phase("update"):
            ad.ops.sin(x)

    profile = profile_steps(step, 3, clock=machine.clock)
    assert profile.step_ms == pytest.approx(10)
    assert (max(profile.step.ms) > 1000, len(profile.step.ms)) == (True, 3)
    assert profile.ops_sum_ms == pytest.approx(5)
    first, second = profile.rows
    assert (first.op, first.scope, first.phase, first.calls) == ("exp", "a", "forward", 2)
    assert (second.op, second.scope, second.phase, second.calls) == ("sin", "b", "update", 1)
    assert (first.ms, first.share) == pytest.approx((4, 0.8))
    assert (first.flops, first.bytes) == (2 * 4, 2 * 32)
    assert first.gflops_per_s == pytest.approx(8 / 4e-3 / 1e9)
    assert first.gbytes_per_s == pytest.approx(64 / 4e-3 / 1e9)


def test_operation_of_no_measured_time_has_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {"exp": 0.0})

    def step(times: int) -> None:
        machine.now += 1
        ad.ops.exp(1.0)

    (row,) = profile_steps(step, 1, clock=machine.clock).rows
    assert (row.ms, row.share, row.gflops_per_s, row.gbytes_per_s) == (0, 0, None, None)


def test_steps_that_differ_are_an_error() -> None:
    lengths = count(1)

    def step(times: int) -> None:
        ad.ops.exp(ad.array(np.ones(next(lengths))))

    with pytest.raises(ValueError, match="two steps ran different primitives"):
        profile_steps(step, 2)


def test_no_hook_remains_after_profiling(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: Counter[str] = Counter()
    x = ad.array(np.ones(3))

    def step(times: int) -> None:
        ran["calls"] += 1
        ran["steps"] += times
        for _ in range(times):
            ad.grad(lambda v: ad.ops.sum(ad.ops.exp(v)))(x)

    profile = profile_steps(step, 4)
    assert len(profile.step.ms) == 4
    assert ran["steps"] >= ran["calls"] > WARMUP_RUNS + 2 * 4
    before = [row.calls for row in profile.rows]
    step(1)
    assert [row.calls for row in profile.rows] == before
