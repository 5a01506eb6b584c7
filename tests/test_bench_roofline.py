from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import bench_samples
import pytest
import training_runs
from click.testing import Result
from command_line import invoke

from adtrain.bench import machine, sampling, step
from adtrain.bench.machine import Roofline
from adtrain.cache import store_document


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, without_gpu: None) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bench_samples.shorten(monkeypatch)
    bench_samples.small_roofline(monkeypatch, "roofline")
    monkeypatch.setattr(sampling, "MIN_SAMPLE_MS", 0.1)
    monkeypatch.setattr(step, "BUDGET_MS", 0.0)


def run(*arguments: str) -> Result:
    result = invoke(*arguments, columns=140)
    assert result.exit_code == 0, result.output
    return result


def test_share_is_the_minimum_time_over_the_time_taken() -> None:
    found = Roofline(100.0, {"float32": 1000.0, "tf32": 4000.0})
    assert found.share(10**9, 0, 2.0) == pytest.approx(0.5)
    assert found.share(10**9, 0, 2.0, "tf32") == pytest.approx(0.125)
    assert found.share(10**9, 10**9, 20.0) == pytest.approx(0.5)


def test_measured_roofline_is_stored_and_shown(tmp_path: Path) -> None:
    assert machine.known_roofline("cpu") is None
    assert "measured" not in run("devices").stdout
    assert json.loads(run("devices", "--json").stdout)["roofline"] == {"cpu": None}
    found = json.loads(run("devices", "--measure", "--json").stdout)["roofline"]["cpu"]
    assert found["gbytes_per_s"] > 0
    assert found["gflops_per_s"].keys() == {"float32", "float64"}
    known = machine.known_roofline("cpu")
    assert known is not None
    assert vars(known) == found
    assert "measured    copy " in run("devices").stdout


def test_roofline_of_a_busy_machine_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "busy_cores", lambda: float(2**16))
    assert machine.measured_roofline("cpu").gbytes_per_s > 0
    assert machine.known_roofline("cpu") is None


@pytest.mark.parametrize("config", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_bench_measures_the_roofline_once_and_reports_it(tmp_path: Path, config: bool) -> None:
    arguments = [str(training_runs.write_config(tmp_path))] if config else ["--op", "nll_loss"]
    first, second = (run("bench", *arguments, "--device", "cpu") for _ in range(2))
    line = "bench: measuring the peak rates of the cpu, a few seconds"
    assert (line in first.stderr, line in second.stderr) == (True, False)
    assert "peak: copy " in second.stdout
    heading, row, *_ = second.stdout.split("\n\n")[1].splitlines()
    assert "of peak" in heading
    assert re.search(r" (\d+\.\d%|cached) ", row)


@pytest.mark.parametrize(
    "document", [[], {"gbytes_per_s": 1.0}, {"gbytes_per_s": 0.0, "gflops_per_s": {"float32": 1.0}}]
)
def test_invalid_stored_roofline_is_a_warning(document: object, caplog: pytest.LogCaptureFixture) -> None:
    store_document(machine.ROOFLINE, machine._roofline_key("cpu"), document)
    with caplog.at_level(logging.WARNING):
        assert machine.known_roofline("cpu") is None
    assert "roofline" in caplog.messages[0]
    assert "ignored, because it cannot be read" in caplog.messages[0]
