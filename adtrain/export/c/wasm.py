"""A trained network as WebAssembly, compiled by clang from the exported C."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from math import prod
from pathlib import Path
from typing import NamedTuple

from adtrain.assets import asset_path
from adtrain.core.errors import AdtrainError
from adtrain.export.c import network, source
from adtrain.export.c.network import Interface
from adtrain.files import write_atomic
from adtrain.training import TrainedModel

ADVICE = "install clang and lld (apt install clang lld), or name one by the environment variable WASM_CC"
EXPORTS = ("image", "outputs", "first_layer", "predict")
OPTIONS = (
    "--target=wasm32", "-std=gnu11", "-O3", "-msimd128", "-mbulk-memory", "-ffreestanding", "-nostdlib",
    "-fno-math-errno",
    "-Wl,--no-entry", "-Wl,--strip-all", "-Wl,-z,stack-size=65536", *(f"-Wl,--export={name}" for name in EXPORTS),
)  # fmt: skip
"""WebAssembly with 128-bit vectors, which browsers have since 2021 (Safari since 2023)."""

GLUE = """\
#include "net.c"
{c_type} *image(void) {{ static {c_type} array[{inputs}]; return array; }}
{output_type} *outputs(void) {{ static {output_type} array[{values}]; return array; }}
const float *first_layer(void) {{ return {first}; }}
int predict(void) {{ return net_predict(image(), outputs()); }}
"""
"""The functions that a page calls. It writes to image(), calls predict(), and reads outputs() and first_layer()."""


class Module(NamedTuple):
    """A WebAssembly module.

    Attributes:
        content: its bytes.
        interface: what it takes and gives.
        first: the shape of the first layer's result.
        memory: bytes of all values.
    """

    content: bytes
    interface: Interface
    first: tuple[int, ...]
    memory: int


def encode(trained: TrainedModel) -> Module:
    """The module of a network. Raises AdtrainError as `source.generate` does, and where clang or lld is missing."""
    about = network.interface(trained)
    files = source.generate(trained, Path("net.c"), simd=True, keep_first=True)
    first = files.translated.first
    glue = GLUE.format(
        c_type=about.c_type,
        output_type=about.output_type,
        inputs=prod(about.image),
        values=prod(about.outputs),
        first=files.translated.code.text(first),
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("net.c", files.source), ("net.h", files.header), ("glue.c", glue)):
            write_atomic(Path(folder, name), text.encode(), durable=False)
        _compile(folder)
        content = Path(folder, "net.wasm").read_bytes()
    return Module(content, about, first_shape(trained, first.size), files.memory)


def first_shape(trained: TrainedModel, size: int) -> tuple[int, ...]:
    """The shape of the first layer's result, which has `size` elements."""
    shape = trained.network.input_shape
    for _, layer, inner in trained.network.model.children(shape):
        output = layer.output_shape(inner)
        if prod(output) == size:
            return output
    return (size,)


def _compile(folder: str) -> None:
    kernels = asset_path("kernels")
    given = os.environ.get("WASM_CC", "clang")
    program = shutil.which(given)
    if program is None:
        raise AdtrainError(f"{given}: no such program; WebAssembly needs clang: {ADVICE}")
    library = kernels / "export" / "wasm"
    folders = ["-isystem", str(library), "-I", str(kernels / "cpu")]
    command = [program, *OPTIONS, *folders, "glue.c", str(library / "library.c"), "-o", "net.wasm"]
    done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error:" in line] or ["it failed"]
        raise AdtrainError(f"{given}: {lines[0].strip()}; {ADVICE}")
