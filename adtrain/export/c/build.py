"""What compilers make of exported C: a library for this machine, and WebAssembly by clang."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adtrain.assets import asset_path
from adtrain.backends.cpu.compiler import CompilerError, find_compiler
from adtrain.cache import open_cache
from adtrain.core.errors import AdtrainError
from adtrain.export.c import network, source
from adtrain.export.c.code import needed
from adtrain.export.c.network import Interface
from adtrain.export.c.source import Files, c_name
from adtrain.files import write_atomic
from adtrain.training import TrainedModel

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
    "-Wl,--no-entry", "-Wl,--strip-all", "-Wl,-z,stack-size=65536",
)  # fmt: skip
"""WebAssembly with 128-bit vectors, which browsers have since 2021 (Safari since 2023)."""

GLUE = """\
#include "net.c"
{c_type} *image(void) {{ static {c_type} array[NET_INPUTS]; return array; }}
{output_type} *outputs(void) {{ static {output_type} array[NET_OUTPUTS]; return array; }}
const float *first_layer(void) {{ return {first}; }}
int predict(void) {{ return net_predict(image(), outputs()); }}
"""
"""The functions that a program calls. It writes to image(), calls predict(), and reads outputs() and first_layer()."""


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
        _compile_wasm(folder, "glue.c", EXPORTS)
        content = Path(folder, "net.wasm").read_bytes()
    return Module(content, about, first.type.shape[1:], files.memory)


def _compile_wasm(folder: str, source: str, exports: Sequence[str]) -> None:
    """Compile the C file `source` in a folder to net.wasm there."""
    given = os.environ.get("WASM_CC", "clang")
    program = shutil.which(given)
    if program is None:
        raise AdtrainError(f"{given}: no such program; WebAssembly needs clang: {ADVICE}")
    library = _wasm_folder()
    folders = ["-isystem", str(library), "-I", str(asset_path("kernels") / "cpu")]
    exported = [f"-Wl,--export={name}" for name in exports]
    command = [program, *OPTIONS, *exported, *folders, source, str(library / "library.c"), "-o", "net.wasm"]
    done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error:" in line] or ["it failed"]
        raise AdtrainError(f"{given}: {lines[0].strip()}; {ADVICE}")


def _wasm_folder() -> Path:
    return asset_path("kernels") / "export" / "wasm"


LAYERS = (
    "linear", "linear_transposed", "matmul", "conv2d", "conv2d_vectors", "conv2d_batch", "conv2d_input_grad",
    "conv_transpose2d", "pad", "max_pool2d", "max_pool2d_where", "max_pool2d_put", "avg_pool2d", "avg_pool2d_put",
    "adaptive_avg_pool2d", "layer_norm", "embedding", "hash_grid", "rnn_tanh", "rnn_relu", "lstm", "gru", "softmax",
    "log_softmax", "attention", "copy",
)  # fmt: skip
"""The functions of the module that statements call."""


def ready_layers() -> bytes:
    """The module with the functions LAYERS that is a part of the package."""
    return (_wasm_folder() / "layers.wasm").read_bytes()


def layers_source() -> str:
    """The text of the C file of `layers.wasm`."""
    texts = needed(LAYERS, "layers_simd.c", "layers.c", "layers_training.c")
    includes = "".join(f"#include <{name}.h>\n" for name in ("math", "stddef", "stdint", "string"))
    return includes + re.sub(rf"^static (?=\w+ (?:{'|'.join(LAYERS)})\()", "", "\n\n".join(texts), flags=re.MULTILINE)


def compiled_layers() -> bytes:
    """The module `layers.wasm`, compiled by clang. Its last section has the digest of its C (`layers_digest`)."""
    with tempfile.TemporaryDirectory() as folder:
        write_atomic(Path(folder, "layers.c"), layers_source().encode(), durable=False)
        _compile_wasm(folder, "layers.c", (*LAYERS, "erff", "__heap_base"))
        content = Path(folder, "net.wasm").read_bytes()
    section = bytes([len(SECTION)]) + SECTION + layers_digest()
    return content + bytes([0, len(section)]) + section


SECTION = b"source"
"""The name of the section with the digest."""


def layers_digest() -> bytes:
    """The SHA-256 of all C that `layers.wasm` is made of."""
    files = sorted(x for x in _wasm_folder().iterdir() if x.suffix in (".c", ".h"))
    files += sorted((asset_path("kernels") / "cpu").glob("elementary*.h"))
    return hashlib.sha256(b"\0".join([layers_source().encode(), *(x.read_bytes() for x in files)])).digest()
