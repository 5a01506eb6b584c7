from __future__ import annotations

import json
from pathlib import Path

import pytest
import training_runs
from click.testing import CliRunner, Result

from adtrain.cli import bench_report
from adtrain.cli.main import cli
from adtrain.measure import bench_config, timing

LAYERS = ["input", "0.linear", "1.relu", "2.linear", "loss", "", "optimizer", "accuracy", "log"]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few runs as the protocol allows."""
    monkeypatch.setattr(timing, "MIN_SAMPLE_MS", 0.0)
    monkeypatch.setattr(timing, "MAX_SAMPLES", timing.MIN_SAMPLES)
    monkeypatch.setattr(bench_config, "BUDGET_SECONDS", 0.0)


def bench(*arguments: str, columns: int = 120) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(cli, ["bench", *arguments, "--device", "cpu"])


def table(result: Result) -> list[str]:
    """The heading and rows between the first two empty lines."""
    assert result.exit_code == 0, result.output
    return result.stdout.split("\n\n")[1].splitlines()


def test_operations_are_timed_forward_and_backward_and_the_protocol_is_told() -> None:
    result = bench("--op", "cross_entropy", "--op", "argmax")
    heading, *rows = table(result)
    assert heading.split() == ["operation", "size", "phase", "ms", "p20", "p80", "GFLOP/s", "GB/s"]
    assert [row.split()[0] for row in rows] == ["argmax"] * 2 + ["cross_entropy"] * 4
    assert [row for row in rows if "backward" in row and "argmax" in row] == []
    assert "numpy" in result.stdout.splitlines()[1]
    assert "threads" in result.stdout.splitlines()[0]
    assert "median, p20 and p80 of" in result.stdout
    assert result.stderr == "bench: timing 4 sizes\n"


@pytest.mark.parametrize("columns", [60, 120])
@pytest.mark.parametrize(("arguments", "last"), [(("--op", "cross_entropy"), "p80"), (("CONFIG",), "GB/s")])
def test_tables_fit_the_terminal(tmp_path: Path, columns: int, arguments: tuple[str, ...], last: str) -> None:
    given = [str(training_runs.write_config(tmp_path)) if a == "CONFIG" else a for a in arguments]
    lines = table(bench(*given, columns=columns))
    assert max(map(len, lines)) <= columns
    assert "ms" in lines[0]
    assert (last in lines[0]) == (columns == 120)


def test_a_config_is_timed_by_layer_and_end_to_end(tmp_path: Path) -> None:
    result = bench(str(training_runs.write_config(tmp_path)), "--no-fuse")
    heading, *rows = table(result)
    assert heading.split()[:3] == ["layer", "forward", "ms"]
    assert [row.split()[0] for row in rows] == [layer or "(no" for layer in LAYERS] + ["sum"]
    assert "on 16 images: " in result.stdout
    assert "images/s" in result.stdout
    assert "of the step timed without hooks" in result.stdout


def test_json_on_stdout_is_all_there_is(tmp_path: Path) -> None:
    found = json.loads(bench(str(training_runs.write_config(tmp_path)), "--no-fuse", "--json", "-").stdout)
    assert [row["layer"] for row in found["layers"]] == LAYERS
    assert found["mode"] == "staged"
    assert found["images_per_second"] == pytest.approx(16 / found["step_ms"]["median"] * 1e3)
    assert found["ops_to_step_ratio"] == pytest.approx(found["ops_sum_ms"] / found["step_ms"]["median"])
    assert found["ops_sum_ms"] == pytest.approx(sum(row["ms"] for row in found["ops"]))
    assert {row["phase"] for row in found["ops"]} == {"forward", "backward", "update"}
    assert found["protocol"]["versions"].keys() == {"adtrain", "python", "numpy"}


@pytest.mark.compiled
def test_a_fused_step_is_timed_by_what_was_fused(tmp_path: Path) -> None:
    found = json.loads(bench(str(training_runs.write_config(tmp_path)), "--json", "-").stdout)
    assert "0.linear+1.relu" in [row["layer"] for row in found["layers"]]
    assert found["mode"] == "fused"
    assert "matmul+add+relu" in {row["op"] for row in found["ops"]}


def test_json_goes_to_a_file_beside_the_table(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    rows = table(bench("--op", "nll_loss", "--json", str(path)))[1:]
    found = json.loads(path.read_text())
    assert len(found["ops"]) == len(rows) == 4
    assert found["protocol"]["samples"] == [timing.MIN_SAMPLES, timing.MAX_SAMPLES]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "cnv2d"), "--op cnv2d: no such operation; did you mean conv2d? (known: abs, "),
        (("--op", "relu", "--op", "zzzz"), "--op zzzz: no such operation; known: abs, "),
        (("mlp", "--op", "relu"), "--op picks operations of the standard sizes"),
        (("--json", "."), "--json .: is a folder, expected a file"),
        (("--json", "absent/x.json"), "--json absent/x.json: absent is no folder that can be written to"),
        (("nosuch",), "nosuch  no such file, nor a packaged config"),
        (("--op", "matmul", "--candidates"), "--candidates: only a GPU has kernels to choose from"),
        (("mlp", "--candidates"), "--candidates is for operations at their standard sizes"),
        (("--op", "matmul", "--autotune", "full"), "--autotune full: only a GPU has kernels to choose from"),
    ],
)
def test_bad_usage_is_one_line_before_anything_is_measured(arguments: tuple[str, ...], message: str) -> None:
    result = bench(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"adtrain: error: {message}")
    assert result.stderr.count("\n") == 1


def test_a_noisy_machine_is_told_of() -> None:
    assert bench_report.noise({"noisy": 0.05}) == []
    (_, line) = bench_report.noise({"noisy": 0.25})
    assert line.startswith("noisy machine: p80 is over 1.3 times p20 in 25% of the measurements")
