from __future__ import annotations

from pathlib import Path

import bench_samples
import pytest
import training_runs

from adtrain.bench import sampling
from adtrain.bench.machine import Roofline
from adtrain.bench.profile import held_bytes
from adtrain.bench.step import ModeBench, bench_batches, bench_modes, record
from adtrain.config.records import plain
from adtrain.training.costs import PHASES, planned_peak

PEAK = Roofline(1.0, {"float32": 1.0})
LAYERS = ["input", "0.linear", "1.relu", "2.linear", "loss", "optimizer", "accuracy", "log"]


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    bench_samples.shorten(monkeypatch)


@pytest.fixture(scope="module")
def by_mode(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModeBench]:
    with pytest.MonkeyPatch.context() as patch:
        bench_samples.shorten(patch)
        return bench_modes(training_runs.prepare(tmp_path_factory.mktemp("modes")))


def test_each_mode_has_as_many_samples_whole_and_by_operation(by_mode: dict[str, ModeBench]) -> None:
    assert list(by_mode) == ["eager", "staged", "fused"]
    for mode in by_mode.values():
        assert len(mode.step.ms) == len(mode.parts.ms) == len(mode.host.ms) == sampling.MIN_SAMPLES
        assert all(timer.totals == mode.totals for steps in mode.timers for timer in steps)


def test_modes_run_the_same_matrix_products(by_mode: dict[str, ModeBench]) -> None:
    def products(mode: ModeBench) -> list[tuple[int, int]]:
        totals = [(key[0], each) for key, each in mode.totals.items() if "matmul" in key[0]]
        return sorted((each.calls, each.flops) for op, each in totals)

    assert products(by_mode["eager"]) == products(by_mode["staged"])
    assert len(by_mode["fused"].totals) < len(by_mode["staged"].totals)


def test_layers_and_operations_add_up_to_the_step(by_mode: dict[str, ModeBench]) -> None:
    found = plain(record(by_mode["staged"], PEAK, "float32"), sparse=True)
    assert [row["layer"] for row in found["layers"]] == LAYERS
    for part in ("layers", "ops"):
        assert sum(row["flops"] for row in found[part]) == found["flops"]
        assert sum(row["bytes"] for row in found[part]) == found["bytes"]
    assert found["images_per_second"] == pytest.approx(16 / found["step"]["median_ms"] * 1e3)
    assert found["parts_to_step"] == pytest.approx(found["parts"]["median_ms"] / found["step"]["median_ms"])
    assert found["idle_share"] == pytest.approx(max(0.0, 1 - found["parts_to_step"]))
    for row in found["ops"]:
        assert row["share"] == pytest.approx(row["time"]["median_ms"] / found["parts"]["median_ms"])
    (layer,) = [row for row in found["layers"] if row["layer"] == "0.linear"]
    assert [layer[phase] is None for phase in PHASES] == [False, False, True]


def test_host_time_on_the_cpu_is_the_step_less_its_operations_and_never_negative(by_mode: dict[str, ModeBench]) -> None:
    mode = by_mode["eager"]
    assert list(mode.host.ms) == pytest.approx(
        [max(a - b, 0.0) for a, b in zip(mode.step.ms, mode.parts.ms, strict=True)]
    )


@pytest.mark.compiled
def test_operations_of_a_compiled_step_name_their_kernels(tmp_path: Path) -> None:
    found = plain(record(bench_modes(training_runs.prepare(tmp_path))["fused"], PEAK, "float32"), sparse=True)
    kernels = {row["op"]: [kernel["name"] for kernel in row["kernels"]] for row in found["ops"]}
    assert kernels["matmul+add+relu"] == ["gemm_float32"]


def test_operations_are_summed_within_samples(by_mode: dict[str, ModeBench]) -> None:
    mode = by_mode["fused"]
    first, second, *_ = mode.totals
    together = mode.of([first, second])
    assert list(together.ms) == pytest.approx(
        [a + b for a, b in zip(mode.of([first]).ms, mode.of([second]).ms, strict=True)]
    )


def test_each_batch_size_has_a_row(tmp_path: Path) -> None:
    experiments = {n: training_runs.prepare(tmp_path / str(n), f"data.batch_size={n}") for n in (8, 32)}
    found = plain(bench_batches(experiments, PEAK), sparse=True)
    assert list(found) == ["8", "32"]
    assert found["32"]["flops"] > 3 * found["8"]["flops"]
    assert found["32"]["planned_bytes"] > found["8"]["planned_bytes"]
    assert found["8"]["images_per_second"] == pytest.approx(8 / found["8"]["step"]["median_ms"] * 1e3)


@pytest.mark.exhaustive
@pytest.mark.compiled
def test_measured_memory_equals_planned_memory(tmp_path: Path) -> None:
    layers = "[linear: 512, relu, linear: 512, relu, linear: 3]"
    experiment = training_runs.prepare(tmp_path, "data.batch_size=90", layers=layers)
    assert held_bytes(experiment, "cpu") == pytest.approx(planned_peak(experiment, "cpu"), rel=0.05)
