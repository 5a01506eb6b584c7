"""The steps of `examples/kernel_ladder` compute what NumPy does, and are as short as they say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from adtrain.backends.cuda import compiler
from adtrain.bench import machine
from adtrain.core.errors import DeviceError

FOLDER = Path(__file__).parent.parent / "examples" / "kernel_ladder"
sys.path.insert(0, str(FOLDER))
import ladder  # noqa: E402

ladder_steps = ladder.steps

SIZES = {
    "matmul": {"m": 384, "n": 256, "k": 64},
    "conv": {"images": 2, "in": 8, "out": 64, "height": 16, "width": 64},
    "softmax": {"rows": 64, "columns": 4096},
}
"""Multiples of all tiles."""
FILES = sorted([*FOLDER.glob("*/cpu_*.c"), *FOLDER.glob("*/gpu_*.cu")])


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_step_is_short_and_begins_with_its_idea_and_gain(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 80
    assert lines[0].startswith("// Idea: ")
    assert lines[1].startswith("// Gain: ")


@pytest.mark.compiled
@pytest.mark.parametrize("name", SIZES)
def test_cpu_steps_compute_what_numpy_does(name: str) -> None:
    errors = {path.stem: error() for path, _, error in ladder.steps(name, "cpu", SIZES[name])}
    assert len(errors) >= 3
    assert max(errors.values()) < 1e-6, errors


@pytest.mark.needs_nvrtc
@pytest.mark.parametrize("target", ["80", "90a"])
def test_gpu_steps_compile_without_spills(target: str) -> None:
    for name, sizes in SIZES.items():
        for path in ladder.files(name, "gpu"):
            log = compiler.compile_source(ladder.source(path), target).log
            assert "0 bytes spill stores" in log, path
            assert all(ladder.launch(path, sizes)[0]), path


def test_a_device_that_is_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise DeviceError("device gpu: no GPU was found")

    monkeypatch.setattr(machine, "known_or_measured", missing)
    result = CliRunner().invoke(ladder.main, ["softmax", "--device", "gpu"])
    assert result.exit_code == 2
    assert result.output.endswith("Error: device gpu: no GPU was found\n")
