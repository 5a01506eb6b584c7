"""The kernels that an H200 launches for the packaged configs are those of a list, tests/golden_lowering.txt."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from adtrain.core.chip import CHIP

from adtrain import config, passes
from adtrain.backends.cuda import tasks
from adtrain.training.preparation import outline

GOLDEN = Path(__file__).with_name("golden_lowering.txt")
COMMAND = "python tests/test_golden_lowering.py"
CONFIGS = ("cnn", "lenet5", "lenet5-augmented", "mlp", "mlp-small", "resnet", "smoke")
BATCH, CAPABILITY, MULTIPROCESSORS = 128, (9, 0), 132
LENGTHS = {
    "AXES", "CHANNELS", "COLUMNS", "CONV_GROUPS", "DH", "DW", "FILTERS", "IMAGE", "IN_CHANNELS", "IN_COLUMNS",
    "IN_ROWS", "KH", "KW", "LENGTH", "OF_IMAGE", "OUT_CHANNELS", "OUT_COLUMNS", "OUT_ROWS", "PH", "PITCH", "POSITIONS",
    "PW", "SH", "SW",
}  # fmt: skip
"""Macros that are lengths of the problem. All others are listed: they say how the work is divided."""


def launches(name: str) -> Iterator[str]:
    """A line each launch of a config's training step: kernel, file and tunables."""
    program = outline(config.load(name, [f"data.batch_size={BATCH}"])).step_program(passes=())
    for improve in (*passes.SIMPLIFY, *passes.FUSE_GPU):
        program = improve(program)
    for equation in program.equations:
        for task in tasks.tasks(equation):
            assert isinstance(task, tasks.Task)
            macros = sorted(o[2:] for o in task.source.options if o.startswith("-D"))
            tunables = [macro for macro in macros if macro.partition("=")[0] not in LENGTHS]
            yield " ".join([task.name, task.source.name, *tunables])


def listed() -> str:
    """What the file holds."""
    lines = [
        f"# The launches of a training step at batch {BATCH} on an H200. After a change made on purpose: {COMMAND}"
    ]
    for name in CONFIGS:
        lines += ["", f"{name}:", *(f"    {launch}" for launch in launches(name))]
    return "\n".join(lines) + "\n"


def test_the_packaged_configs_launch_the_kernels_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHIP, "capability", CAPABILITY)
    monkeypatch.setattr(CHIP, "multiprocessors", MULTIPROCESSORS)
    monkeypatch.setattr(tasks, "MEASURED", {})
    assert listed() == GOLDEN.read_text(), f"if the change is on purpose: {COMMAND}"


if __name__ == "__main__":
    GOLDEN.write_text(listed())
    sys.stdout.write(f"{GOLDEN.name} is written\n")
