"""The analysis with the CPU in the place of a GPU, and networks small enough for a test."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import training_runs

from adtrain import config, training
from adtrain.backends.cpu.naive import LABEL as NAIVE
from adtrain.bench.analysis import ops as analysis_ops
from adtrain.bench.analysis import steps as analysis_steps
from adtrain.bench.analysis.ops import SIZED_OPS, Contestant, compared, crossovers
from adtrain.bench.peers.numpy_steps import naive_step
from adtrain.bench.timing import sampling
from adtrain.bench.timing.sampling import Timing
from adtrain.cli import bench_analysis

pytestmark = pytest.mark.compiled
BOTH = [Contestant("cpu", "cpu"), Contestant("gpu", "cpu")]
LABELS = ["cpu", "gpu", "gpu+copies"]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few runs as the protocol allows."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sampling, "MIN_SAMPLE_MS", 0.0)
    monkeypatch.setattr(analysis_steps, "SAMPLE_MS", 0.0)
    monkeypatch.setattr(sampling, "MAX_SAMPLES", sampling.MIN_SAMPLES)
    monkeypatch.setattr(analysis_steps, "LAYER_STEPS", 2)
    monkeypatch.setattr(analysis_steps, "BATCHES", (8, 32, 128))


def lines(found: dict[str, Any], width: int = 60) -> list[str]:
    json.dumps(found, allow_nan=False)
    report = list(bench_analysis.report(found, width))
    assert max(map(len, report)) <= width
    return report


def test_an_operation_over_its_ladder() -> None:
    op = replace(SIZED_OPS[0], ladder=(4, 8))
    found = analysis_ops.measured(op, BOTH)
    assert [row["n"] for row in found["rows"]] == [4, 8]
    assert all(sorted(row["times"]) == sorted([NAIVE, *LABELS]) for row in found["rows"])
    assert all(sorted(row["speedups"]) == sorted([NAIVE, *LABELS[1:]]) for row in found["rows"])
    assert list(found["crossover"]) == LABELS[1:]
    report = lines({"operations": [found]})
    heading = report[report.index("matmul: n x n by n x n") + 1]
    assert heading.split() == ["n", "naive", "cpu", "gpu", "+copies", "x", "gpu", "x", "+copies"]


def test_a_naive_loop_is_not_waited_for_where_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analysis_ops, "NAIVE_FLOPS", 2 * 4**3)
    found = analysis_ops.measured(replace(SIZED_OPS[0], ladder=(4, 8)), BOTH)
    assert [NAIVE in row["times"] for row in found["rows"]] == [True, False]
    assert lines({"operations": [found]})


def test_a_config_by_naive_loops_on_each_device_by_layer_and_over_batches(tmp_path: Path) -> None:
    path = str(training_runs.write_config(tmp_path))
    found = {
        **analysis_steps.step(path, [], BOTH, naive_step),
        "layers": analysis_steps.layers(path, [], BOTH),
        "batches": analysis_steps.over_batches(path, [], BOTH),
    }
    assert list(found["times"]) == [NAIVE, *LABELS]
    scopes = [row["layer"] for row in found["layers"]]
    assert [x for x in scopes if x in ("0.linear", "1.relu", "2.linear")] == ["0.linear", "1.relu", "2.linear"]
    assert all(row["ms"].keys() == {"cpu", "gpu"} for row in found["layers"])
    assert [row["batch"] for row in found["batches"]["rows"]] == [8, 32], "there are 90 images"
    assert "ms of each layer, an operation a kernel" in lines({"configs": [found]})


def test_a_layer_that_nobody_has_written_as_a_loop_is_named(tmp_path: Path) -> None:
    path = str(training_runs.write_config(tmp_path))
    found = bench_analysis._config(path, ["model.layers=[{linear: 4}, gelu, {linear: 3}]"], BOTH)
    assert list(found["times"]) == LABELS
    assert f"{NAIVE} skipped: no counterpart of gelu in plain NumPy" in " ".join(
        " ".join(lines({"configs": [found]})).split()
    )


def test_networks_grow_in_width_and_in_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analysis_steps, "WIDTHS", (4, 8))
    monkeypatch.setattr(analysis_steps, "DEPTHS", (1, 3))
    path = str(training_runs.write_config(tmp_path))
    growing = [analysis_steps.over_widths(path, BOTH), analysis_steps.over_depths(path, BOTH)]
    assert [[row[x["over"]] for row in x["rows"]] for x in growing] == [[4, 8], [1, 3]]
    assert "hidden layers of 256: a step over the depth" in lines({"growing": growing})


@pytest.mark.parametrize(("width", "depth", "linears"), [(16, 1, [16, 10]), (4, 3, [4, 4, 4, 10])])
def test_a_grown_network_has_the_layers(tmp_path: Path, width: int, depth: int, linears: list[int]) -> None:
    cfg = config.load(training_runs.write_config(tmp_path), [analysis_steps.grown(width, depth)])
    layers = training.prepare(cfg).network.model.layers
    assert [layer.out_features for layer in layers[::2]] == linears  # type: ignore[attr-defined]
    assert [layer.kind() for layer in layers[1::2]] == ["relu"] * depth


def test_speedups_are_those_of_the_rounds() -> None:
    times = {"cpu": Timing([4.0, 8, 12, 16, 20, 24]), "gpu": Timing([1.0, 2, 3, 4, 5, 6]), NAIVE: Timing([8.0] * 6)}
    found = compared(times, "cpu")
    assert found["speedups"]["gpu"] == {"median": 4, "low": 4, "high": 4}
    assert found["speedups"][NAIVE]["median"] == pytest.approx(14 / 8)
    rows = [{"n": n, "speedups": {"gpu": {"median": x}, NAIVE: {"median": 9.0}}} for n, x in ((1, 0.5), (4, 2))]
    assert crossovers(rows, "n") == {"gpu": {"wins": "from", "at": pytest.approx(2), "says": "from 2"}}
