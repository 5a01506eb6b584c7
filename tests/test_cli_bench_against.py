from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import training_runs
from click.testing import CliRunner, Result

from adtrain.bench.peers import catalogue, comparison
from adtrain.bench.timing import roofline
from adtrain.cli.main import cli

LAYERS = "[{conv2d: {out_channels: 4, kernel_size: 3}}, relu, flatten, {linear: 3}]"


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As few and as short samples as the protocol allows."""
    for pace in ("STEPS", "OPERATIONS"):
        monkeypatch.setattr(comparison, pace, comparison.Pace(0.0, 0.0))
    monkeypatch.setattr(roofline, "known", lambda device: None)


def bench(*arguments: str, columns: int = 100) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(cli, ["bench", *arguments])


def without_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(catalogue, "find_spec", lambda name: None if name == "jax" else there(name))


def test_ratios_and_who_does_not_take_part_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_jax(monkeypatch)
    path, file = str(training_runs.write_config(tmp_path)), tmp_path / "found.json"
    result = bench(path, "--device", "cpu", "--against", "numpy, jax,torch-graph", "--json", str(file))
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    (row,) = found["steps"]
    assert (found["kind"], row["batch_size"], row["precision"]) == ("against", 16, "float32")
    assert list(row["times"]) == ["adtrain", "numpy"]
    assert row["off"]["numpy"] < 1e-5
    ratio = row["ratios"]["numpy"]
    assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
    assert row["skipped"] == {
        "torch-graph": "runs on gpu only",
        "jax-jit": "jax is not installed (pip install jax)",
        "jax-scan": "jax is not installed (pip install jax)",
    }
    table = result.stdout.splitlines()
    (line,) = (line for line in table if line.startswith("numpy"))
    assert f"{ratio['median']:.2f}" in line
    assert f"{ratio['low']:.2f} to {ratio['high']:.2f}" in line
    assert "torch-graph skipped: runs on gpu only" in table
    assert "jax-scan skipped: jax is not installed (pip install jax)" in table


@pytest.mark.compiled
def test_pytorch_takes_the_same_steps_as_the_compiled_program(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = str(training_runs.write_config(tmp_path))
    overrides = ["--set", "model.input=[1, 6, 6]", "--set", f"model.layers={LAYERS}"]
    result = bench(path, *overrides, "--device", "cpu", "--against", "torch-eager", "--json", "-")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["steps"]
    assert row["off"]["torch-eager"] < 1e-5
    assert row["different"] == []
    assert row["overrides"] == [overrides[1], overrides[3], "schedule=constant"]


def test_a_side_that_computes_something_else_has_no_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(comparison.LOSS_TOLERANCE, "float32", 0.0)
    path = str(training_runs.write_config(tmp_path))
    result = bench(path, "--device", "cpu", "--against", "numpy")
    assert result.exit_code == 1
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("numpy"))
    assert line.split()[2] == "DIFFERENT"


def test_a_layer_without_counterpart_is_named(tmp_path: Path) -> None:
    path = str(training_runs.write_config(tmp_path))
    layers = "model.layers=[{linear: 8}, gelu, {linear: 3}]"
    result = bench(path, "--set", layers, "--device", "cpu", "--against", "numpy")
    assert "numpy skipped: no counterpart of gelu in plain NumPy" in result.stdout.splitlines()


def test_operations_are_compared_with_their_errors_and_fit_the_terminal() -> None:
    result = bench("--device", "cpu", "--op", "embedding", "--against", "numpy", columns=60)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 60
    (heading,) = (line for line in lines if line.startswith("operation"))
    assert heading.split() == ["operation", "size", "side", "ms", "ratio"]
    assert any(line.split()[:1] == ["numpy"] for line in lines)
    assert any("no counterpart of the gradient of embedding" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mlp", "--against", "toch"), "--against toch: no such peer; did you mean torch? (known: torch, jax, numpy"),
        (("--op", "matmull", "--against", "numpy"), "--op matmull: no such operation; did you mean matmul?"),
        (("nosuch", "--against", "numpy"), "nosuch  no such file, nor a packaged config"),
        (("mlp", "cnn"), "several CONFIGs are for --against and --device cpu,gpu; give one"),
        (("mlp", "--against", "numpy", "--op", "relu"), "--op: it is about operations, give no CONFIG"),
        (("--against", "numpy", "--set", "a=b"), "--set: it is about the step of a CONFIG, give one"),
        (("--against", "numpy", "--sizes", "8"), "--sizes: it goes neither with --against nor with two devices"),
        (("mlp", "--set", "training.epochs=x"), "--set training.epochs"),
    ],
)
def test_bad_usage_is_one_line_before_anything_is_started(arguments: tuple[str, ...], message: str) -> None:
    result = bench(*arguments, "--device", "cpu")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"adtrain: error: {message}")
    assert result.stderr.count("\n") == 1


def test_two_devices_need_a_gpu(without_gpu: None) -> None:
    result = bench("--device", "cpu,gpu")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("adtrain: error: device gpu")
    assert result.stderr.count("\n") == 1


def test_a_device_that_is_none_is_told_with_those_there_are() -> None:
    result = bench("--device", "cpu,tpu")
    assert result.exit_code == 2
    assert "'cpu,tpu' is not one of 'auto', 'cpu', 'gpu', 'cpu,gpu'" in result.stderr


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found in /proc")
def test_an_interrupt_ends_the_sides_and_writes_nothing(tmp_path: Path) -> None:
    path, file = str(training_runs.write_config(tmp_path)), tmp_path / "found.json"
    # What is started in the background ignores the signal, and hands that down.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    main = f"{heard}; from adtrain.cli.main import main; main()"
    arguments = ["bench", path, "--device", "cpu", "--against", "numpy", "--json", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", main, *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(pids := children.read_text().split()) < 2:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error.splitlines()[-1]) == (130, b"", b"adtrain: interrupted")
    assert not file.exists()
    for pid in pids:  # one that was just being started ends when it finds nobody to answer
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.01)
