"""Exported C, compiled with a program that prints the outputs for images, for the tests of exports."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np

from adtrain.export.c import network, source
from adtrain.export.c.source import WARNINGS
from adtrain.training import TrainedModel

DRIVER = """\
#include <stdio.h>
#include "HEADER"
static const TYPE images[] = {IMAGES};
int main(void) {
    static float outputs[UPPER_OUTPUTS];
    for (int i = 0; i < COUNT; i++) {
        const int result = NAME_predict(images + i * UPPER_INPUTS, outputs);
        printf("%d", result);
        for (int j = 0; j < UPPER_OUTPUTS; j++) printf(" %.9g", (double)outputs[j]);
        printf("\\n");
    }
    return 0;
}
"""


def compile_c(compiler: Sequence[str], folder: Path, *arguments: str) -> None:
    """Call a compiler in a folder; a warning is an error."""
    command = [*compiler, *WARNINGS, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]


def write(trained: TrainedModel, path: Path, simd: bool = False) -> Path:
    files = source.generate(trained, path, simd)
    path.write_text(files.source)
    path.with_suffix(".h").write_text(files.header)
    return path


def write_driver(trained: TrainedModel, path: Path, images: np.ndarray) -> str:
    """Write the program that prints the outputs for `images` beside the C file at `path`; its name."""
    about, name = network.interface(trained), source.c_name(path)
    numbers = ", ".join(str(x) if images.dtype.kind == "u" else f"{x}f" for x in images.reshape(-1))
    values = {"HEADER": path.with_suffix(".h").name, "TYPE": about.c_type, "IMAGES": numbers}
    values |= {"UPPER": name.upper(), "COUNT": str(len(images)), "NAME": name}
    text = DRIVER
    for key, value in values.items():
        text = text.replace(key, value)
    driver = path.with_name("driver.c")
    driver.write_text(text)
    return driver.name


def outputs(
    trained: TrainedModel,
    path: Path,
    images: np.ndarray,
    compiler: Sequence[str] = ("gcc",),
    options: Sequence[str] = ("-O0",),
    simd: bool = False,
    runner: Sequence[str] = (),
    extra: Sequence[str] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs (N, ...) and returned numbers (N,) of the exported network, compiled by `compiler` at `path`."""
    write(trained, path, simd)
    driver = write_driver(trained, path, images)
    compile_c(compiler, path.parent, *options, f"./{path.name}", driver, *extra, "-o", "program", "-lm")
    done = subprocess.run(
        [*runner, "./program"], cwd=path.parent, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[:2000]
    rows = np.array([line.split() for line in done.stdout.splitlines()], np.float64)
    shape = network.interface(trained).outputs
    assert rows.shape == (len(images), 1 + prod(shape))
    return rows[:, 1:].reshape(-1, *shape).astype(np.float32), rows[:, 0].astype(int)


def has(*programs: str) -> bool:
    return all(map(shutil.which, programs))
