"""The kernels that an H200 launches for the packaged configs are those listed in tests/golden_lowering.txt."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from program_samples import for_gpu

from adtrain import config
from adtrain.backends.cuda import H200
from adtrain.backends.cuda.launch_plan import LaunchPlan
from adtrain.backends.cuda.lower import Lowering
from adtrain.training.preparation import outline

GOLDEN = Path(__file__).with_name("golden_lowering.txt")
COMMAND = "python tests/test_golden_lowering.py"
CONFIGS = (
    "cifar-94",
    "cifar-small",
    "cnn",
    "lenet5",
    "lenet5-augmented",
    "lstm",
    "mlp",
    "mlp-small",
    "mnist-99",
    "resnet",
    "smoke",
    "vit",
)
BATCH = 128
LENGTHS = {
    "AXES", "COLUMNS", "CONV_GROUPS", "DH", "DW", "FILTERS", "FP16_WEIGHT_BYTES", "HIDDEN", "IMAGE_PITCH",
    "IN_CHANNELS", "IN_COLUMNS", "IN_ROWS", "KH", "KW", "LENGTH", "OUT_CHANNELS", "OUT_COLUMNS", "OUT_ROWS", "PH",
    "PITCH", "PW", "SH", "STAGES_PER_IMAGE", "STAGE_CHANNELS", "STAGE_POSITIONS", "SW", "TILES_PER_IMAGE",
    "WEIGHT_BYTES",
}  # fmt: skip
"""Macros that are lengths of the problem, which are not listed. The others say how the work is divided."""


def launches(name: str) -> Iterator[str]:
    """A line for each launch of a config's training step: kernel, file and macros."""
    lowering = Lowering(H200)
    program = outline(config.load(name, [f"data.batch_size={BATCH}"])).step_program(passes=())
    for equation in for_gpu(program).equations:
        for launch in lowering.launches(equation):
            assert isinstance(launch, LaunchPlan)
            macros = sorted(option[2:] for option in launch.source.options if option.startswith("-D"))
            listed = [macro for macro in macros if macro.partition("=")[0] not in LENGTHS]
            yield " ".join([launch.name, launch.source.name, *listed])


def listed() -> str:
    """The text of the file."""
    lines = [
        f"# The launches of a training step at batch {BATCH} on an H200. After a change made on purpose: {COMMAND}"
    ]
    for name in CONFIGS:
        lines += ["", f"{name}:", *(f"    {launch}" for launch in launches(name))]
    return "\n".join(lines) + "\n"


def test_the_packaged_configs_launch_the_listed_kernels() -> None:
    assert listed() == GOLDEN.read_text(), f"if the change is on purpose: {COMMAND}"


if __name__ == "__main__":
    GOLDEN.write_text(listed())
    sys.stdout.write(f"{GOLDEN.name} is written\n")
