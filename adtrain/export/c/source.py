"""The text of an exported C file and of its header, by templates, and the content of its file of weights.

From this text a C compiler makes a library for this machine, and clang makes WebAssembly.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from adtrain.backends.cpu.compiler import CompilerError, find_compiler
from adtrain.cache import open_cache
from adtrain.codegen.elementwise import c_type
from adtrain.core.errors import AdtrainError
from adtrain.export.c import int8, network
from adtrain.export.c.code import Part, c_string, needed, numbers
from adtrain.export.c.network import Interface, TrainingStep, training_step
from adtrain.files import asset_path, write_atomic
from adtrain.templates import environment
from adtrain.text import visible
from adtrain.training import Experiment, TrainedModel
from adtrain.version import __version__

MAX_BYTES = 2**31 - 1
"""The largest array that the indices of the C functions, which are int, can reach."""

MARK = 8
"""Bytes at the start of a file of weights, a digest, by which `NAME_load` refuses the file of another network."""


class Files(NamedTuple):
    """An exported network.

    Attributes:
        source, header: the texts of NAME.c and NAME.h.
        weights: the content of the file of weights; None if the weights are in the source.
        memory: bytes of the array that holds all values.
        constants: bytes of the arrays of weights.
        translated: the statements of the network.
    """

    source: str
    header: str
    weights: bytes | None
    memory: int
    constants: int
    translated: network.Translated


def c_name(path: Path) -> str:
    """The prefix of the exported names: the file's name with characters that C allows."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", path.stem)
    return name if re.match(r"[A-Za-z]", name) else f"net_{name}"


def generate(
    trained: TrainedModel,
    path: Path,
    simd: bool = False,
    weights: Path | None = None,
    calibration: np.ndarray | None = None,
    keep_first: bool = False,
    experiment: Experiment | None = None,
) -> Files:
    """The files for the C file at `path`.

    Args:
        simd: use the functions of `layers_simd.c`.
        weights: the path of a separate file for the weights.
        calibration: images (N, C, H, W) of the training set; with them the network is in int8.
        keep_first: keep the first layer's result in memory until the end.
        experiment: the run's, of which the file also has the training step.

    Raises AdtrainError as `network.translated` and `int8.translated` do, for a name that C cannot include, and for
    arrays of 2 GiB.
    """
    if re.search(r'["\\\n\r?*]', path.name):
        raise AdtrainError(f"{path}: the name has characters that #include cannot hold, expected another name")
    about, name = network.interface(trained, int8=calibration is not None), c_name(path)
    step = None if experiment is None else training_step(experiment, name, about)
    if calibration is None:
        found = network.translated(trained, simd, training=step is not None)
    else:
        found = int8.translated(trained, calibration)
    code = found.code
    code.place([found.outputs, *([found.first] if keep_first else [])])
    constants = sum(x.nbytes for x in code.arrays.values())
    if max(constants, code.bytes) > MAX_BYTES:
        raise AdtrainError(f"the network needs arrays of {constants:,} bytes, C functions reach {MAX_BYTES:,}")
    content = None if weights is None else weights_file(code.arrays)
    values = _values(path, found, about, content, step)
    values |= {"constants": constants, "features": _features(trained)}
    source, header = (environment().get_template("network.c.j2").render(values, part=part) for part in "ch")
    return Files(source, header, content, code.bytes, constants, found)


def _values(
    path: Path, found: network.Translated, about: Interface, content: bytes | None, step: TrainingStep | None
) -> dict[str, Any]:
    """The values of the templates; `content` is that of the file of weights, if they are in one."""
    code = found.code
    kinds = {"simd": code.simd, "int8": code.integers}
    files = [*(f"layers_{kind}.c" for kind, chosen in kinds.items() if chosen), "layers.c", "layers_training.c"]
    called = {**code.library, **({"argmax": None} if about.chooses else {}), **(step.code.library if step else {})}
    functions = [*needed(called, *files), *code.functions()]
    includes = {
        "stdbool": step or any(re.search(r"\bbool\b", text) for text in functions),
        "math": step or any(re.search(r"\b\w+f\(|INFINITY|NAN|\b(exp|log|sqrt|tanh)\(", text) for text in functions),
        "stdio": content is not None,
        "string": step or content is not None or any("mem" in text for text in functions),
    }
    in_file, start = dict[str, int](), 0
    for array, x in code.arrays.items() if content is not None else ():
        if x.dtype == np.float32:
            in_file[array], start = start, start + x.size
    inside = {array: x for array, x in code.arrays.items() if array not in in_file}
    return {
        **about._asdict(),
        "version": __version__,
        "name": c_name(path),
        "upper": c_name(path).upper(),
        "source": shlex.quote(path.name),
        "header": path.with_suffix(".h").name,
        "options": "-O3 -march=native -ffp-contract=fast" if code.simd else "-O2",
        "first": 1 if content is None else 2,
        "shape": about.outputs,
        "includes": [f"{file}.h" for file, included in includes.items() if included],
        "inputs": prod(about.image),
        "outputs": prod(about.outputs),
        "labels": [c_string(label) for label in about.labels],
        "results": about.results,
        "arrays": Markup("\n".join(_arrays(inside, "" if step else "const "))),  # many: not to be searched
        "weights_file": in_file,
        "weights_in_file": start,
        "mark": list(content[:MARK]) if content is not None else [],
        "memory": code.bytes,
        "memory_arrays": [declaration for declaration, _ in code.memory.values()],
        "integers": code.integers,
        "functions": functions,
        "calls": "\n".join(code.body()).strip("\n"),
        "scores": code.text(Part(found.outputs, found.outputs.size - len(about.labels))) if about.chooses else "",
        "step": step,
        "step_arrays": Markup("\n".join(_arrays(step.code.arrays) if step else [])),
        "step_functions": step.code.functions() if step else [],
        "is_image": about.c_type == "uint8_t" and about.image[0] in (1, 3),
    }


def _arrays(arrays: Mapping[str, np.ndarray], qualifier: str = "const ") -> Iterator[str]:
    for name, x in arrays.items():
        yield f"static {qualifier}{c_type(x.dtype)} {name}[{x.size}] = {{"
        yield from numbers(x)
        yield "};\n"


def weights_file(arrays: dict[str, np.ndarray]) -> bytes:
    """MARK bytes of their digest, then all float32 arrays, little-endian, one after the other."""
    content = b"".join(x.astype("<f4").tobytes() for x in arrays.values() if x.dtype == np.float32)
    return hashlib.sha256(content).digest()[:MARK] + content


def _features(trained: TrainedModel) -> list[tuple[str, str]]:
    """The features of a row of a table, and what to give for an empty cell."""
    encoder = trained.encoder
    if encoder is None or trained.image_shape != (len(encoder.features), 1, 1):
        return []
    fill = [f", {x!r} for an empty cell" for x in encoder.fill] or [""] * len(encoder.features)
    # No name ends the comment, begins another one or is a trigraph.
    names = [re.sub(r"[*?\\]", "_", visible(name)) for name in encoder.features]
    return list(zip(names, fill, strict=True))


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
        code = Path(folder, path.name)
        write_atomic(code, files.source.encode(), durable=False)
        write_atomic(code.with_suffix(".h"), files.header.encode(), durable=False)
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


WASM_ADVICE = "install clang and lld (apt install clang lld), or name one by the environment variable WASM_CC"
WASM_EXPORTS = ("image", "outputs", "first_layer", "predict")
WASM_OPTIONS = (
    "--target=wasm32", "-std=gnu11", "-O3", "-msimd128", "-mbulk-memory", "-ffreestanding", "-nostdlib",
    "-fno-math-errno",
    "-Wl,--no-entry", "-Wl,--strip-all", "-Wl,-z,stack-size=65536",
)  # fmt: skip
"""WebAssembly with 128-bit vectors, which browsers have since 2021 (Safari since 2023)."""

WASM_GLUE = """\
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
    """The module of a network. Raises AdtrainError as `generate` does, and where clang or lld is missing."""
    about = network.interface(trained)
    files = generate(trained, Path("net.c"), simd=True, keep_first=True)
    first = files.translated.first
    glue = WASM_GLUE.format(**about._asdict(), first=files.translated.code.text(first))
    with tempfile.TemporaryDirectory() as folder:
        for name, text in (("net.c", files.source), ("net.h", files.header), ("glue.c", glue)):
            write_atomic(Path(folder, name), text.encode(), durable=False)
        _compile_wasm(folder, "glue.c", WASM_EXPORTS)
        content = Path(folder, "net.wasm").read_bytes()
    return Module(content, about, first.type.shape[1:], files.memory)


def _compile_wasm(folder: str, source: str, exports: Sequence[str]) -> None:
    """Compile the C file `source` in a folder to net.wasm there."""
    given = os.environ.get("WASM_CC", "clang")
    program = shutil.which(given)
    if program is None:
        raise AdtrainError(f"{given}: no such program; WebAssembly needs clang: {WASM_ADVICE}")
    library = _wasm_folder()
    folders = ["-isystem", str(library), "-I", str(asset_path("kernels") / "cpu")]
    exported = [f"-Wl,--export={name}" for name in exports]
    command = [program, *WASM_OPTIONS, *exported, *folders, source, str(library / "library.c"), "-o", "net.wasm"]
    done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error:" in line] or ["it failed"]
        raise AdtrainError(f"{given}: {lines[0].strip()}; {WASM_ADVICE}")


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
