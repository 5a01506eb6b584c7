from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from adtrain.cli.main import cli
from adtrain.data import catalogue


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


@pytest.fixture
def small_mnist(monkeypatch: pytest.MonkeyPatch) -> catalogue.Entry:
    """MNIST by its two small files, so that a test need not hash the large ones."""
    entry = catalogue.CATALOGUE["mnist"]
    small = replace(entry, sha256={name: digest for name, digest in entry.sha256.items() if "labels" in name})
    monkeypatch.setitem(catalogue.CATALOGUE, "mnist", small)
    return small


def test_list_names_every_data_set() -> None:
    shown, rows = run("data", "list"), json.loads(run("data", "list", "--json").stdout)
    assert [row["name"] for row in rows] == list(catalogue.CATALOGUE)
    assert all(row["name"] in shown.stdout and Path(row["folder"]).is_dir() for row in rows)


def test_verify_passes_on_the_files_that_travel(small_mnist: catalogue.Entry) -> None:
    result = run("data", "verify")
    assert result.exit_code == 0
    assert result.stdout.count(": ok\n") == 2
    found = json.loads(run("data", "verify", "mnist", "--json").stdout)
    assert found["passed"] is True
    assert {row["file"]: row["found"] for row in found["rows"]} == small_mnist.sha256


def test_verify_exits_1_on_a_mismatch(small_mnist: catalogue.Entry) -> None:
    name, digest = next(iter(small_mnist.sha256.items()))
    small_mnist.sha256[name] = "0" * 64
    result = run("data", "verify", "mnist")
    assert result.exit_code == 1
    assert f"mnist/{name}: FAILED: {digest}, expected SHA-256 {'0' * 64}\n" in result.stdout
    result = run("data", "verify", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["passed"] is False


def test_verify_of_an_unknown_data_set_is_a_usage_error() -> None:
    result = run("data", "verify", "minst")
    assert result.exit_code == 2
    assert result.stderr.startswith("adtrain: error: unknown data set 'minst'; known: mnist")


def test_devices_shows_the_cpu_and_says_why_no_gpu(without_gpu: None) -> None:
    shown, found = run("devices"), json.loads(run("devices", "--json").stdout)
    assert found["gpu"] is None
    assert "pip install adtrain[gpu]" in found["gpu_reason"]
    assert found["cpu"]["usable_cores"] >= 1
    for key in ("name", "blas", "numpy", "python"):
        assert found["cpu"][key]
        assert found["cpu"][key] in shown.stdout
