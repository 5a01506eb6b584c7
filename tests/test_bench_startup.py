"""`adtrain bench startup`: what is measured, and messages about peers that fail or have another loss."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke

from adtrain.bench import compare, startup
from adtrain.bench.result import text_lines
from adtrain.bench.startup import Start, Task
from adtrain.core.errors import AdtrainError

LOSSES = {"adtrain": 2.5, "torch-eager": 2.5001, "numpy": 2.6}


def measured(monkeypatch: pytest.MonkeyPatch, peers: str, *failing: str) -> tuple[int, dict[str, Any], Sequence[str]]:
    """Exit code, result and text of the command, in which each process takes a second more than the one before."""
    started = list[tuple[str, str]]()

    def run(name: str, task: Task, folder: Path, cache: str) -> Start:
        if name in failing:
            raise AdtrainError("no device")
        started.append((name, cache))
        seconds = float(len(started))
        return Start(
            seconds, {"imports": seconds / 2, "rest": seconds / 2}, None if name == "adtrain" else LOSSES[name]
        )

    monkeypatch.setattr(startup, "run", run)
    monkeypatch.setattr(startup, "first_steps", lambda name, *_: Start(1.0, {}, LOSSES[name]))
    monkeypatch.setattr("adtrain.bench.peers.systems.System.obstacle", lambda *_: None)
    done = invoke("bench", "startup", "smoke", "--device", "cpu", "--against", peers, "--samples", "2", "--json")
    result = json.loads(done.stdout)
    return done.exit_code, result, text_lines(compare.parse(result, "startup.json"), 100)


def test_systems_start_in_turns_cold_and_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    code, result, text = measured(monkeypatch, "torch-eager")
    assert code == 0
    assert [(x["system"], x["cache"], x["samples"], x["seconds"]) for x in result["starts"]] == [
        ("adtrain", "cold", [1.0, 7.0], 4.0),
        ("adtrain", "warm", [2.0, 8.0], 5.0),
        ("torch-eager", "cold", [3.0, 5.0], 4.0),
        ("torch-eager", "warm", [4.0, 6.0], 5.0),
    ]
    assert "adtrain, empty: imports 2.00, rest 2.00" in text


def test_a_peer_with_another_loss_and_one_that_fails_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    code, result, text = measured(monkeypatch, "numpy,torch-eager", "torch-eager")
    assert (code, result["different"], result["failed"]) == (1, ["numpy"], {"torch-eager": "no device"})
    assert {"torch-eager failed: no device", "numpy: the first loss is 2.6, expected adtrain's"} <= set(text)


def test_the_worker_prints_the_time_of_the_first_steps(capsys: pytest.CaptureFixture[str]) -> None:
    startup.main("numpy", "cpu", "smoke")
    found = json.loads(capsys.readouterr().out)
    assert set(found["spans"]) == {"imports", "first steps"}
    assert found["loss"] > 0


def test_the_error_of_a_command_that_fails_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(AdtrainError, match=r"^nosuch: neither a file nor a packaged config"):
        startup.run("adtrain", Task("nosuch", (), "cpu"), tmp_path, "cold")
