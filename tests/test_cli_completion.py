"""What a shell completes: names of configs, runs and operations."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from adtrain import config
from adtrain.cli import main


def completed(*words: str) -> list[str]:
    """The values that a shell offers for the last word."""
    *arguments, incomplete = words
    shell = ShellComplete(main.cli, {}, "adtrain", "_ADTRAIN_COMPLETE")
    return [item.value for item in shell.get_completions(arguments, incomplete) if item.type == "plain"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/mlp", "runs/mlp-2", "other/best"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("")
    (tmp_path / "runs" / "empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "command", [["train"], ["summary"], ["graph"], ["bench", "step"], ["bench", "against", "numpy"]]
)
def test_packaged_configs_are_completed(here: Path, command: list[str]) -> None:
    assert completed(*command, "mlp") == [name for name in config.packaged() if name.startswith("mlp")]


@pytest.mark.parametrize("command", ["eval", "report", "compare", "export", "summary"])
def test_runs_are_completed(here: Path, command: str) -> None:
    assert completed(command, "runs/m") == ["runs/mlp", "runs/mlp-2"]
    assert completed(command, "other/") == ["other/best"]


@pytest.mark.parametrize("command", [["gradcheck"], ["bench", "ops"], ["bench", "against", "numpy"], ["bench"]])
def test_operations_are_completed(here: Path, command: list[str]) -> None:
    found = completed(*command, "--op", "max_pool2")
    assert found == ["max_pool2d"]


def test_peers_are_completed_one_after_another() -> None:
    assert completed("bench", "against", "torch-e") == ["torch-eager"]
    assert completed("bench", "against", "numpy,ja") == [
        "numpy,jax",
        "numpy,jax-jit",
        "numpy,jax-scan",
        "numpy,jax-vmap",
    ]


def test_bench_completes_its_commands_and_configs(here: Path) -> None:
    assert {"ops", "step", "against", "devices", "compare", "mlp"} <= set(completed("bench", ""))
