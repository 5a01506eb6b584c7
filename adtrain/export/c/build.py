"""What compilers make of exported C: a library for this machine, WebAssembly by clang, and a page that runs that."""

from __future__ import annotations

import base64
import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adtrain.assets import asset_path
from adtrain.backends.cpu.toolchain import CompilerError, find_compiler
from adtrain.cache import open_cache
from adtrain.core.errors import AdtrainError
from adtrain.data.digit_image import DARK
from adtrain.export.c import network, source
from adtrain.export.c.network import Interface
from adtrain.export.c.source import Files, c_name
from adtrain.files import write_atomic
from adtrain.nn.fields import size_text
from adtrain.templates import environment
from adtrain.training import TrainedModel
from adtrain.training.inputs import is_of_mnist

WARNINGS = ("-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror")


class Compiled(NamedTuple):
    """A loaded library of an exported network, and the size of its object file in bytes, with its weights."""

    library: ctypes.CDLL
    name: str
    interface: Interface
    object_bytes: int

    def predict(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The outputs (N, ...), in float32 or float64, and the classes (N,) of images (N, C, H, W).

        Raises AdtrainError where the function refuses an image.
        """
        dtype = {"uint16_t": np.uint16, "float": np.float32, "double": np.float64}[self.interface.output_type]
        outputs = np.zeros((len(images), *self.interface.outputs), dtype)
        classes = np.zeros(len(images), np.int32)
        pointers = [ctypes.c_void_p(x.ctypes.data) for x in (images, outputs, classes)]
        predict = getattr(self.library, f"{self.name}_predict_batch")
        if predict(pointers[0], ctypes.c_size_t(len(images)), *pointers[1:]):
            raise AdtrainError("the exported function refuses an image of the test set")
        return outputs / np.float32(65536) if dtype == np.uint16 else outputs, classes


@contextmanager
def compiled(files: Files, path: Path, interface: Interface) -> Iterator[Compiled]:
    """The files, which are to be written to `path` and beside it, as a library.

    It is compiled without a warning, for all instructions of this processor. Raises CompilerError where there is no
    compiler that works, and AdtrainError where it refuses the file.
    """
    cache = open_cache("cpu")
    compiler = find_compiler(cache)
    with cache.build_folder() as folder:
        source = Path(folder, path.name)
        write_atomic(source, files.source.encode(), durable=False)
        write_atomic(source.with_suffix(".h"), files.header.encode(), durable=False)
        given = f"./{path.name}"
        try:
            compiler.run([*WARNINGS, "-fno-openmp", "-ffp-contract=fast", "-c", given, "-o", "net.o"], folder)
            compiler.run(["-shared", "net.o", "-o", "net.so", "-lm"], folder)
        except CompilerError as error:
            raise AdtrainError(f"{path}: the exported C does not compile; nothing was written: {error}") from None
        library = ctypes.CDLL(str(Path(folder, "net.so")))
        name = c_name(path)
        if files.weights is not None:
            weights = Path(folder, "weights.bin")
            write_atomic(weights, files.weights, durable=False)
            if getattr(library, f"{name}_load")(str(weights).encode()):
                raise AdtrainError("the exported function refuses its file of weights")
        yield Compiled(library, name, interface, Path(folder, "net.o").stat().st_size)


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
{c_type} *image(void) {{ static {c_type} array[NET_INPUTS]; return array; }}
{output_type} *outputs(void) {{ static {output_type} array[NET_OUTPUTS]; return array; }}
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


def webassembly(trained: TrainedModel) -> Module:
    """The module of a network. Raises AdtrainError as `source.generate` does, and where clang or lld is missing."""
    about = network.interface(trained)
    files = source.generate(trained, Path("net.c"), simd=True, keep_first=True)
    first = files.translated.first
    glue = GLUE.format(**about._asdict(), first=files.translated.code.text(first))
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("net.c", files.source), ("net.h", files.header), ("glue.c", glue)):
            write_atomic(Path(folder, name), text.encode(), durable=False)
        _compile_wasm(folder)
        content = Path(folder, "net.wasm").read_bytes()
    return Module(content, about, first.type.shape[1:], files.memory)


def _compile_wasm(folder: str) -> None:
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


def page(trained: TrainedModel, module: Module) -> bytes:
    """The page with the network's `module`: one file, which loads nothing else.

    Raises AdtrainError for a network whose input is not an image of bytes in grey or colour, or whose output is
    not a class.
    """
    about = module.interface
    channels, height, width = about.image
    is_image = about.c_type == "uint8_t" and channels in (1, 3) and min(height, width) > 1
    if not is_image or not about.chooses or len(about.outputs) != 1:
        found = f"{size_text(about.image)} {'bytes' if about.c_type == 'uint8_t' else 'numbers'}"
        drawn = "a page draws images in grey or colour, and shows classes"
        raise AdtrainError(f"{drawn}; this run takes {found}; write a .wasm file")
    sizes = f"{len(module.content) / 1000:,.0f} kB of WebAssembly, {module.memory / 1000:,.0f} kB of memory"
    template = environment().get_template("demo.html.j2")
    return template.render(
        title=trained.config.name,
        note=f"The network runs in this page: {sizes}. It sends nothing.",
        about={
            "channels": channels, "height": height, "width": width, "labels": about.labels, "first": module.first,
            "centred": is_of_mnist(trained), "dark": trained.network.mean[0] < DARK,
        },
        program=base64.b64encode(module.content).decode(),
    ).encode()  # fmt: skip
