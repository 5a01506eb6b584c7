"""The analysis of CPU and GPU, with the CPU in place of the GPU and small networks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_samples
import pytest
import training_runs

from adtrain import config, training
from adtrain.backends.cpu.naive import LABEL as NAIVE
from adtrain.bench import devices, sampling
from adtrain.bench.devices import Devices, SizedRow, compared, config_row, crossovers
from adtrain.bench.machine import protocol
from adtrain.bench.op_table import BY_NAIVE_LOOPS, TimedOp
from adtrain.bench.sampling import Timing
from adtrain.bench.text import parts
from adtrain.bench.view import Ratio
from adtrain.config.records import plain

BOTH = {"cpu": "cpu", "gpu": "cpu"}
LABELS = ["cpu", "gpu", "gpu+copies"]


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    bench_samples.shorten(monkeypatch)
    monkeypatch.setattr(devices, "BATCHES", (8, 32, 128))
    monkeypatch.setattr(sampling, "NOISY", math.inf)  # the marks of noisy times would widen the tables


def at_sizes(*sizes: int) -> TimedOp:
    """Products of matrices of these sizes."""
    (op,) = (op for op in BY_NAIVE_LOOPS if op.op == "matmul")
    assert op.naive
    return replace(op, naive=replace(op.naive, sizes=sizes))


def lines(width: int = 60, **found: Any) -> list[str]:
    result = Devices(protocol=protocol("cpu", None), **found)
    json.dumps(result.to_json(), allow_nan=False)
    report = list(parts(result.view().parts, width))
    assert max(map(len, report)) <= width
    return report


def test_operation_has_times_and_speedups_at_each_size() -> None:
    op = at_sizes(4, 8)
    found = devices.measured(op, BOTH)
    assert [row.n for row in found.rows] == [4, 8]
    assert all(sorted(row.times) == sorted([NAIVE, *LABELS]) for row in found.rows)
    assert all(sorted(row.speedups) == sorted([NAIVE, *LABELS[1:]]) for row in found.rows)
    assert list(found.crossover) == LABELS[1:]
    report = lines(operations=[found])
    heading = report[report.index("matmul: n x n by n x n") + 1]
    assert heading.split() == ["n", "naive", "cpu", "gpu", "+copies", "x", "gpu", "x", "+copies"]


def test_naive_loop_is_skipped_at_large_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "NAIVE_FLOPS", 2 * 4**3)
    found = devices.measured(at_sizes(4, 8), BOTH)
    assert [NAIVE in row.times for row in found.rows] == [True, False]
    assert lines(operations=[found])


def test_config_is_timed_whole_by_layer_and_over_batch_sizes(tmp_path: Path) -> None:
    path = str(training_runs.write_config(tmp_path))
    found = config_row(path, [], BOTH)
    assert list(found.times) == [NAIVE, *LABELS]
    scopes = [row.layer for row in found.layers]
    assert [x for x in scopes if x in ("0.linear", "1.relu", "2.linear")] == ["0.linear", "1.relu", "2.linear"]
    assert all(row.ms.keys() == {"cpu", "gpu"} for row in found.layers)
    assert [row.batch for row in found.batches.rows] == [8, 32], "there are 90 images"
    assert "ms of each layer, with a kernel for each operation" in lines(configs=[found])


def test_layer_without_naive_loop_is_named(tmp_path: Path) -> None:
    path = str(training_runs.write_config(tmp_path))
    found = config_row(path, ["model.layers=[{linear: 4}, gelu, {linear: 3}]"], BOTH)
    assert list(found.times) == LABELS
    assert f"{NAIVE} skipped: no counterpart of gelu in plain NumPy" in " ".join(
        " ".join(lines(configs=[found])).split()
    )


def test_steps_are_timed_over_widths_and_depths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "WIDTHS", (4, 8))
    monkeypatch.setattr(devices, "DEPTHS", (1, 3))
    path = str(training_runs.write_config(tmp_path))
    growing = [devices.over_widths(path, BOTH), devices.over_depths(path, BOTH)]
    assert [[row.size for row in x.rows] for x in growing] == [[4, 8], [1, 3]]
    assert "hidden layers of 256: a step over the depth" in lines(growing=growing)


@pytest.mark.parametrize(("width", "depth", "linears"), [(16, 1, [16, 10]), (4, 3, [4, 4, 4, 10])])
def test_hidden_layers_override_makes_the_network(tmp_path: Path, width: int, depth: int, linears: list[int]) -> None:
    cfg = config.load(training_runs.write_config(tmp_path), [devices.hidden_layers(width, depth)])
    layers = training.prepare(cfg).network.model.layers
    assert [layer.out_features for layer in layers[::2]] == linears  # type: ignore[attr-defined]
    assert [layer.kind() for layer in layers[1::2]] == ["relu"] * depth


def test_speedups_are_ratios_within_rounds() -> None:
    times = {"cpu": Timing([4.0, 8, 12, 16, 20, 24]), "gpu": Timing([1.0, 2, 3, 4, 5, 6]), NAIVE: Timing([8.0] * 6)}
    found = compared(times, "cpu")
    assert found["speedups"]["gpu"] == Ratio(4, 4, 4)
    assert found["speedups"][NAIVE].median == pytest.approx(14 / 8)
    sized = ((n, {"gpu": Ratio(x, x, x), NAIVE: Ratio(9.0, 9.0, 9.0)}) for n, x in ((1, 0.5), (4, 2.0)))
    rows = [SizedRow(n=n, times={}, speedups=speedups) for n, speedups in sized]
    assert plain(crossovers(rows), sparse=True) == {"gpu": {"wins": "from", "at": pytest.approx(2), "says": "from 2"}}
