"""The time of a run is accounted for from the start of its process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import adtrain.__main__ as startup
from adtrain.core.timeline import SHORT_SECONDS, Timeline

SCRIPT = "from adtrain.__main__ import main; main()"


@pytest.mark.exhaustive
def test_the_spans_of_a_run_add_up_to_the_time_of_its_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, "train", "smoke", "-q", "--device", "cpu", "--steps", "5"]
    before = time.perf_counter()
    subprocess.run([*command], cwd=tmp_path, check=True, capture_output=True)
    wall = time.perf_counter() - before
    found = json.loads((tmp_path / "runs/smoke/summary.json").read_text())
    spans = found["spans"]
    assert {"startup", "imports", "data", "evaluation", "write"} <= {span["name"] for span in spans}
    assert sum(span["seconds"] for span in spans) == pytest.approx(found["total_seconds"])
    ends = [span["start"] + span["seconds"] for span in spans]
    assert [span["start"] for span in spans[1:]] == pytest.approx(ends[:-1], abs=1e-6)
    assert found["total_seconds"] < wall + 0.02  # the system's clock of process starts ticks every 10 ms


def test_a_short_activity_counts_as_part_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("adtrain.core.timeline.perf_counter", lambda: now[0])
    timeline = Timeline(0.0, "training")
    now[0] = 1.0
    timeline.change("write")
    now[0] += SHORT_SECONDS / 2
    timeline.change("training")
    now[0] = 2.0
    timeline.change("evaluation")
    now[0] = 3.0
    assert timeline.spans() == [("training", 0.0, 2.0), ("evaluation", 2.0, 1.0)]


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ("train mlp", {}, True),
        ("train mlp --device gpu", {}, True),
        ("train mlp --device=cpu", {}, False),
        ("train mlp --device gpu --device cpu", {}, False),
        ("train mlp --ranks 2", {}, False),
        ("train mlp", {"PMI_RANK": "0"}, False),
        ("train --help", {}, False),
        ("summary mlp", {}, False),
        ("", {}, False),
    ],
)
def test_the_context_is_created_early_only_for_a_command_on_the_gpu(
    arguments: str, environment: dict[str, str], expected: bool
) -> None:
    assert startup.wants_gpu(arguments.split(), environment) == expected
