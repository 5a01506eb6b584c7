"""Errors of `adtrain bench`: one line, before anything is measured."""

from __future__ import annotations

from pathlib import Path

import bench_samples
import pytest
import training_runs
from command_line import invoke

from adtrain.bench.peers import systems

pytestmark = pytest.mark.unfused

NUMBERS = "expected whole numbers above 0 with commas"
PATH = "CONFIG"
"""Stands for the path of a small config."""

ERRORS = [
    ("ops --op cnv2d", "--op cnv2d: no such operation; did you mean conv2d?"),
    ("--op relu --op zzzz", "--op zzzz: no such operation; known: abs, "),
    ("--sizes 4,x", f"Invalid value for '--sizes': found '4,x', {NUMBERS}"),
    ("--sizes 536870912", "Invalid value for '--sizes': found '536870912', expected whole"),
    (f"--sizes {'9' * 5000}", "Invalid value for '--sizes': found '9999"),
    ("--sizes 0", f"Invalid value for '--sizes': found '0', {NUMBERS}"),
    ("--dtype int32 --op exp", "exp: "),
    ("--op matmul --candidates", "--candidates: only a GPU has kernels to choose from"),
    ("--op matmul --autotune full", "--autotune full: only a GPU has kernels to choose from"),
    ("--json-file .", ".: cannot be written (Is a directory)"),
    ("--json-file absent/x.json", "absent/x.json: cannot be written (No such file or directory)"),
    ("--json-file - --json", "--json-file - and --json: only one result fits on standard output"),
    ("--html absent/x.html", "absent/x.html: cannot be written (No such file or directory)"),
    ("--json --html -", "--json and --html -: only one result fits on standard output"),
    ("mlp --op relu", "No such option '--op'"),
    ("mlp --trace absent/x.json", "absent/x.json: cannot be written (No such file or directory)"),
    ("--batch-sizes 4", "Missing argument 'CONFIG|RUN'"),
    ("nosuch", "nosuch: neither a file nor a packaged config"),
    ("smoke --set data.batch_size=2147483647", "--set data.batch_size: found 2147483647, expected at most 60,000"),
    ("smoke --batch-sizes 70000", "--batch-sizes 70000: there are 60,000 training examples"),
    ("comapre a.json b.json", "comapre: neither a command nor a config; did you mean compare?"),
    ("scaling mlp --ranks 1,3", "--ranks: found 3, expected powers of two"),
    ("mlp --ranks 0", f"Invalid value for '--ranks': found '0', {NUMBERS}"),
    ("scaling mlp --against torch-graph", "torch-graph: runs on gpu only"),
    ("scaling mlp --against torch-dpd", "torch-dpd: no such peer; did you mean torch-ddp?"),
    ("startup mlp --samples 0", "Invalid value for '--samples'"),
    ("startup mlp --against jax", "jax-jit, jax-scan: jax is not installed (pip install jax)"),
    ("against toch mlp", "toch: no such peer; did you mean torch?"),
    ("against numpy --op matmull", "--op matmull: no such operation; did you mean matmul?"),
    ("against numpy nosuch", "nosuch: neither a file nor a packaged config"),
    ("against numpy mlp --op relu", "--op selects operations; give no CONFIG"),
    ("against numpy --set a=b", "--set changes a config; give a CONFIG"),
    ("against numpy mlp --set training.epochs=x", "--set training.epochs"),
    ("against torch-graph", "torch-graph: runs on gpu only"),
    ("against torch-max", "torch-max: runs whole steps only"),
    ("against torch-max-tf32 mlp", "torch-max-tf32: runs on gpu only"),
    ("against torch-maxx mlp", "torch-maxx: no such peer; did you mean torch-max?"),
    ("against numpy mlp --members 2", "numpy: trains one network at a time"),
    ("against torch-vmap mlp", "torch-vmap: trains many networks together; give --members N"),
    ("against torch-vmap --members 2", "--members trains networks; give a CONFIG"),
    ("against jax", "jax-jit, jax-scan: jax is not installed (pip install jax)"),
    ("against numpy mlp --set data.shards=2", "--set data.shards: found 2, expected none: steps"),
    (f"race {PATH} --target 0.9 --against jax-scan", "jax-scan: takes steps and runs operations, but no whole"),
    (f"race {PATH} --target 0.9 --against toch", "toch: no such peer; did you mean torch?"),
    (f"race {PATH} --target 1.5", "Invalid value for '--target': found '1.5', expected a number from 0 to 1 (see"),
    (f"race {PATH}", "Missing option '--target'"),
    (f"race {PATH} --target 0.9 --set data.shards=2", "--set data.shards: found 2, expected none"),
    (f"race {PATH} --target 0.9 --html .", ".: cannot be written (Is a directory)"),
]


@pytest.mark.parametrize(("words", "message"), ERRORS, ids=[words[:60] for words, _ in ERRORS])
def test_error_is_one_line_before_measuring(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systems, "find_spec", lambda name: None if name == "jax" else True)
    monkeypatch.setattr("adtrain.bench.scaling.find_spec", lambda name: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bench_samples.small_roofline(monkeypatch, "roofline of errors")
    path = str(training_runs.write_config(tmp_path)) if PATH in words else ""
    assert_one_line(["bench", *words.replace(PATH, path).split(), "--device", "cpu"], message)


def test_devices_need_a_gpu(without_gpu: None) -> None:
    assert_one_line(["bench", "devices"], "device gpu")


def assert_one_line(arguments: list[str], message: str) -> None:
    result = invoke(*arguments, columns=120)
    assert (result.exit_code, result.stdout) == (2, "")
    *progress, line = result.stderr.splitlines()
    assert line.startswith(f"adtrain: error: {message}")
    assert all(each.startswith("bench: ") for each in progress)
