from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_runs import command, one_line, summary, train
from training_runs import write_config

from adtrain import training


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_config(tmp_path)


def repeat(cfg: Path, *options: str | Path, expect: int = 0) -> Any:
    arguments = ("--device", "cpu", "--profile-steps", "0", "--epochs", "1")
    return command("train", cfg, *arguments, *options, expect=expect)


def test_mean_and_sample_deviation_of_the_runs(cfg: Path) -> None:
    found = json.loads(repeat(cfg, "--repeat", "3", "--seed", "4", "--json").stdout)
    names = [f"runs/tiny-seed{seed}" for seed in (4, 5, 6)]
    assert [run["run"] for run in found["runs"]] == names
    for run in found["runs"]:
        written = summary(Path(run["run"]))
        assert run["seed"] == written["seed"]
        assert {"accuracy": run["accuracy"], "loss": run["loss"]} == written["test"]
    for field in ("accuracy", "loss", "train_seconds"):
        values = [run[field] for run in found["runs"]]
        assert found["mean"][field] == pytest.approx(np.mean(values))
        assert found["deviation"][field] == pytest.approx(np.std(values, ddof=1))


def test_the_table_has_a_row_per_run(cfg: Path) -> None:
    result = repeat(cfg, "--repeat", "2", "--output-dir", "both")
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "both/seed0", "both/seed1", "mean", "deviation"]
    assert lines[1].split()[2] == f"{summary(Path('both/seed0'))['test']['accuracy']:.2%}"
    assert result.stderr.startswith("run 1 of 2, seed 0\n")


def test_a_repeated_run_equals_a_single_run_with_its_seed(cfg: Path) -> None:
    repeat(cfg, "--repeat", "2", "--output-dir", "both")
    train(cfg, Path("alone"), "--epochs", "1", "--seed", "1")
    for name in ("config.yaml", "model.safetensors"):
        assert Path("alone", name).read_bytes() == Path("both/seed1", name).read_bytes()


def test_a_second_call_gets_new_folders(cfg: Path) -> None:
    repeat(cfg, "--repeat", "2")
    repeat(cfg, "--repeat", "2")
    assert {path.name for path in Path("runs").iterdir()} == {
        "tiny-seed0", "tiny-seed1", "tiny-seed0-2", "tiny-seed1-2"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [(KeyboardInterrupt(), 130, "adtrain: interrupted"), (MemoryError(), 2, "adtrain: error: not enough memory")],
)
def test_finished_runs_are_kept_when_a_later_one_fails(
    cfg: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, last: str
) -> None:
    original, started = training.run_in_folder, []

    def run(*arguments: Any) -> Any:
        started.append(arguments)
        if len(started) == 3:
            raise error
        return original(*arguments)

    monkeypatch.setattr(training, "run_in_folder", run)
    result = repeat(cfg, "--repeat", "4", expect=code)
    lines = result.stderr.splitlines()
    assert "finished runs are kept: runs/tiny-seed0, runs/tiny-seed1" in lines
    assert lines[-1] == last
    assert result.stdout == ""
    assert [Path("runs", f"tiny-seed{seed}", "summary.json").exists() for seed in range(4)] == [
        True,
        True,
        False,
        False,
    ]


def test_a_signal_after_the_last_test_batch_is_not_lost(cfg: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = training.run_in_folder

    def run(*arguments: Any) -> Any:
        result = original(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(training, "run_in_folder", run)
    result = repeat(cfg, "--repeat", "3", expect=143)
    assert "stopped before the summary; continue with: adtrain train --resume runs/tiny-seed0" in result.stderr
    assert [path.name for path in Path("runs").iterdir()] == ["tiny-seed0"]
    monkeypatch.setattr(training, "run_in_folder", original)
    command("train", "--resume", "runs/tiny-seed0", "--profile-steps", "0")
    assert summary(Path("runs/tiny-seed0"))["epochs"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output-dir", "both"], "both/seed1: already exists; give another --output-dir, or remove it first"),
        (["--seed", str(2**64 - 1)], "training.seed: found 18446744073709551616"),
    ],
)
def test_nothing_is_trained_if_one_of_the_runs_is_impossible(cfg: Path, options: list[str], message: str) -> None:
    Path("both/seed1").mkdir(parents=True)
    assert message in one_line(repeat(cfg, "--repeat", "3", *options, expect=2))
    assert not Path("runs").exists()
    assert not Path("both/seed0").exists()


def test_repeat_1_is_refused(cfg: Path) -> None:
    assert "Invalid value for '--repeat'" in one_line(repeat(cfg, "--repeat", "1", expect=2))
