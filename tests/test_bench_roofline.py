from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import training_runs
from click.testing import CliRunner, Result

from adtrain import documents
from adtrain.bench.steps import modes
from adtrain.bench.timing import roofline, sampling
from adtrain.bench.timing.roofline import Roofline
from adtrain.cli.main import cli


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, without_gpu: None) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(roofline.COPY_BYTES, "cpu", 1 << 16)
    monkeypatch.setitem(roofline.MATRIX, "cpu", 16)
    monkeypatch.setattr(sampling, "MIN_SAMPLE_MS", 0.1)
    monkeypatch.setattr(sampling, "MAX_SAMPLES", sampling.MIN_SAMPLES)
    monkeypatch.setattr(modes, "BUDGET_MS", 0.0)
    monkeypatch.setattr(modes, "SAMPLE_MS", 0.0)
    monkeypatch.setitem(modes.PAUSE_S, "cpu", 0.0)
    monkeypatch.setattr(roofline, "busy_cores", lambda: 0.0)


def run(*arguments: str) -> Result:
    result = CliRunner(env={"COLUMNS": "140"}).invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    return result


def test_a_share_is_the_least_time_over_the_time_taken() -> None:
    found = Roofline(100.0, {"float32": 1000.0, "tf32": 4000.0})
    assert found.share(10**9, 0, 2.0) == pytest.approx(0.5)
    assert found.share(10**9, 0, 2.0, "tf32") == pytest.approx(0.125)
    assert found.share(10**9, 10**9, 20.0) == pytest.approx(0.5)


def test_what_was_measured_is_kept_and_shown(tmp_path: Path) -> None:
    assert roofline.known("cpu") is None
    assert "measured" not in run("devices").stdout
    assert json.loads(run("devices", "--json").stdout)["roofline"] == {"cpu": None}
    found = json.loads(run("devices", "--measure", "--json").stdout)["roofline"]["cpu"]
    assert found["gbytes_per_s"] > 0
    assert found["gflops_per_s"].keys() == {"float32", "float64"}
    known = roofline.known("cpu")
    assert known is not None
    assert known._asdict() == found
    assert "measured    copy " in run("devices").stdout


def test_what_a_busy_machine_reaches_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "busy_cores", lambda: float(2**16))
    assert roofline.measured("cpu").gbytes_per_s > 0
    assert roofline.known("cpu") is None


@pytest.mark.parametrize("config", [False, True])
def test_benchmarks_measure_it_once_and_say_so(tmp_path: Path, config: bool) -> None:
    arguments = [str(training_runs.write_config(tmp_path))] if config else ["--op", "nll_loss"]
    first, second = (run("bench", *arguments, "--device", "cpu") for _ in range(2))
    line = "bench: measuring what the cpu reaches at best, a few seconds"
    assert (line in first.stderr, line in second.stderr) == (True, False)
    assert "peak: copy " in second.stdout
    heading, row, *_ = second.stdout.split("\n\n")[1].splitlines()
    assert "of peak" in heading
    assert "%" in row


@pytest.mark.parametrize(
    "document", [[], {"gbytes_per_s": 1.0}, {"gbytes_per_s": 0.0, "gflops_per_s": {"float32": 1.0}}]
)
def test_a_file_that_holds_something_else_is_named(document: object, caplog: pytest.LogCaptureFixture) -> None:
    documents.store(roofline.KIND, roofline._key("cpu"), document)
    with caplog.at_level(logging.WARNING):
        assert roofline.known("cpu") is None
    assert "roofline" in caplog.messages[0]
    assert "not used, it cannot be read" in caplog.messages[0]
