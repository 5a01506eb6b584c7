from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import bench_samples
import pytest
import training_runs
from click.testing import Result
from command_line import invoke
from waiting import PATIENCE, wait_until

from adtrain.bench import compare, machine, page
from adtrain.bench.peers import comparison, systems
from adtrain.bench.peers.systems import WorkerFailed, WorkerProcess
from adtrain.bench.view import factor

LAYERS = "[{conv2d: {out_channels: 4, kernel_size: 3}}, relu, flatten, {linear: 3}]"


@pytest.fixture(scope="module")
def running() -> Iterator[dict[str, WorkerProcess]]:
    """The worker processes that the tests have started, one for each system. The next test uses them too."""
    workers: dict[str, WorkerProcess] = {}
    yield workers
    for worker in workers.values():
        worker.close()


@pytest.fixture(autouse=True)
def quick(running: dict[str, WorkerProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    """Short samples, no roofline, and workers that are running already."""
    bench_samples.shorten(monkeypatch)
    monkeypatch.setattr(machine, "known_roofline", lambda device: None)

    def started(names: Sequence[str], *arguments: Any) -> AbstractContextManager[dict[str, WorkerProcess]]:
        for name in set(names) - set(running):
            running[name] = WorkerProcess(name, *arguments)
        return nullcontext({name: running[name] for name in names})

    monkeypatch.setattr("adtrain.bench.against.started", started)


def bench(*arguments: str, columns: int = 100) -> Result:
    return invoke("bench", *arguments, columns=columns)


@pytest.mark.exhaustive
def test_ratios_are_shown_and_each_skipped_peer_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates a machine with PyTorch and without JAX."""
    monkeypatch.setattr(systems, "find_spec", lambda name: None if name == "jax" else True)
    path, file = str(training_runs.write_config(tmp_path)), tmp_path / "found.json"
    files = ["--json-file", str(file), "--html", str(tmp_path / "found.html")]
    result = bench("against", "numpy, jax,torch-graph", path, "--device", "cpu", *files)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert (tmp_path / "found.html").read_text() == page.render(compare.parse(found, ""))
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
    assert factor(ratio["median"]) in line
    assert f"{factor(ratio['low'])} to {factor(ratio['high'])}" in line
    assert "torch-graph skipped: runs on gpu only" in table
    assert "jax-scan skipped: jax is not installed (pip install jax)" in table


@pytest.mark.needs_torch
@pytest.mark.compiled
def test_pytorch_and_the_compiled_program_have_the_same_losses(tmp_path: Path) -> None:
    path = str(training_runs.write_config(tmp_path))
    overrides = ["--set", "model.input=[1, 6, 6]", "--set", f"model.layers={LAYERS}"]
    result = bench("against", "torch-eager", path, *overrides, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["steps"]
    assert row["off"]["torch-eager"] < 1e-5
    assert row["different"] == []
    assert row["overrides"] == [overrides[1], overrides[3], "schedule=constant"]


@pytest.mark.needs_torch
def test_steps_of_many_networks_are_compared(tmp_path: Path) -> None:
    path = str(training_runs.write_config(tmp_path))
    result = bench("against", "torch-vmap", path, "--members", "2", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["steps"]
    assert row["members"] == 2
    assert row["off"]["torch-vmap"] < 1e-5
    assert list(row["ratios"]) == ["torch-vmap"]


def test_a_peer_with_other_losses_has_no_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(comparison.LOSS_TOLERANCE, "float32", -1.0)  # no losses are close enough, not even equal ones
    path = str(training_runs.write_config(tmp_path))
    result = bench("against", "numpy", path, "--device", "cpu")
    assert result.exit_code == 1
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("numpy"))
    assert line.split()[2] == "DIFFERENT"


def test_losses_in_tf32_in_place_of_float32_have_the_tolerance_of_tf32() -> None:
    names = "torch-max", "torch-max-tf32"
    assert [comparison.loss_tolerance(name, "float32") for name in names] == [1e-3, 2e-2]
    assert [comparison.loss_tolerance(name, "bfloat16") for name in names] == [1e-1, 1e-1]


def test_peer_that_fails_is_named_with_its_reason_and_the_rest_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, reason = WorkerProcess.receive, "InvalidCxxCompiler: No working C++ compiler found"

    def failing(self: WorkerProcess) -> Any:
        answer = receive(self)
        if self.name == "numpy":
            raise WorkerFailed(reason)
        return answer

    monkeypatch.setattr(WorkerProcess, "receive", failing)
    path, file = str(training_runs.write_config(tmp_path)), tmp_path / "found.json"
    result = bench("against", "numpy", path, "--device", "cpu", "--json-file", str(file))
    assert result.exit_code == 0, result.output
    (row,) = json.loads(file.read_text())["steps"]
    assert (list(row["times"]), row["failed"]) == (["adtrain"], {"numpy": reason})
    assert f"numpy failed: {reason}" in result.stdout.splitlines()


def test_layer_without_counterpart_is_named(tmp_path: Path) -> None:
    path = str(training_runs.write_config(tmp_path))
    layers = "model.layers=[{linear: 8}, gelu, {linear: 3}]"
    result = bench("against", "numpy", path, "--set", layers, "--device", "cpu")
    assert "numpy skipped: no counterpart of gelu in plain NumPy" in result.stdout.splitlines()


@pytest.mark.exhaustive
def test_operations_show_errors_and_fit_the_terminal() -> None:
    result = bench("against", "numpy", "--op", "embedding", "--device", "cpu", columns=60)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 60
    (heading,) = (line for line in lines if line.startswith("operation"))
    assert heading.split() == ["operation", "size", "phase", "system", "ms", "ratio"]
    assert any(line.split()[:1] == ["numpy"] for line in lines)
    assert any("no counterpart of the gradient of embedding" in line for line in lines)


ENDLESS = """\
from time import sleep
from adtrain.bench import machine
from adtrain.bench.peers.systems import WorkerProcess
from adtrain.cli.main import main

WorkerProcess.receive = lambda self: sleep(1e6)
main()
"""
"""A command that waits for an answer of a worker when the signal comes, however late that is."""


@pytest.mark.exhaustive
@pytest.mark.usefixtures("default_signals")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found in /proc")
def test_interrupt_kills_the_workers_and_writes_nothing(tmp_path: Path) -> None:
    path, file = str(training_runs.write_config(tmp_path)), tmp_path / "found.json"
    arguments = ["bench", "against", "numpy", path, "--device", "cpu", "--json-file", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(lambda: len(children.read_text().split()) >= 2, process)
    pids = children.read_text().split()
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, error.splitlines()[-1]) == (130, b"", b"adtrain: interrupted")
    assert not file.exists()
    # A worker that was still starting ends when its stdin closes.
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
