"""An exported C file, compiled for this machine and loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adtrain.backends.cpu.toolchain import CompilerError, find_compiler
from adtrain.cache import open_cache
from adtrain.core.errors import AdtrainError
from adtrain.export.c.network import Interface
from adtrain.export.c.source import Files, c_name
from adtrain.files import write_atomic

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
        return outputs / np.float32(65536) if self.interface.gives_integers else outputs, classes


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
