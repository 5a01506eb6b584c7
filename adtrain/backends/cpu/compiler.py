"""C sources to a loaded library, compiled in parallel and cached by content, compiler, processor and flags."""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adtrain.assets import asset_path
from adtrain.backends.cpu.toolchain import Compiler, CompilerError, CompilerKilled, end_all, find_compiler, processor
from adtrain.cache import Cache, digest, open_cache, reason
from adtrain.codegen.expressions import c_type
from adtrain.core.errors import AdtrainError
from adtrain.files import write_atomic

__all__ = ["CompilerError", "Source", "load"]

SOFT_PAUSE = 1
"""omp_pause_soft of omp.h."""


class Source(NamedTuple):
    """A file of `kernels/cpu`, or one with an absolute path, compiled for one or two element types, its T and U."""

    file: str
    dtypes: tuple[np.dtype, ...]

    @property
    def suffix(self) -> str:
        """The suffix of its functions' names: "_float32", "_uint8_int64"."""
        return "".join(f"_{dtype.name}" for dtype in self.dtypes)

    @property
    def definitions(self) -> list[str]:
        """The compiler options for the element types."""
        types = [f"-D{name}={c_type(dtype)}" for name, dtype in zip("TU", self.dtypes, strict=False)]
        return [*types, f"-DSUFFIX={self.suffix}"]


def load(program_source: str, kernels: Collection[Source]) -> ctypes.CDLL:
    """The library of a program's C text and of the kernels that it calls.

    Objects of kernels and whole libraries are kept in the user's cache, so that loading the same one again runs no
    compiler, in any process.

    Args:
        program_source: C11, which may include the headers of `kernels/cpu`.
        kernels: each file and element types that the program needs a function of.

    Raises CompilerError, one line that says what to do: no compiler, a compiler that fails, a disk that is full; and
    CompilerKilled where a signal ended the compiler.
    """
    if os.name != "posix":
        raise CompilerError("code is compiled on Linux and macOS only")
    try:
        folder = asset_path("kernels") / "cpu"
        cache = open_cache("cpu")
        compiler = find_compiler(cache)
        folders = sorted({folder, *((folder / k.file).parent for k in kernels)})
        headers = [path.read_text(encoding="utf-8") for parent in folders for path in sorted(parent.glob("*.h"))]
        setting = digest(compiler.identity, *compiler.flags, processor(), *headers)
        objects = {digest(setting, (folder / k.file).read_text(encoding="utf-8"), *k.definitions): k for k in kernels}
        key = digest(setting, program_source, *sorted(objects))
        library = cache.find(key, ".so")
        if library is None:
            library = cache.store(key, ".so", _Build(compiler, cache, folder).run(program_source, objects))
            cache.prune()
        with _short_spins():
            loaded = ctypes.CDLL(str(library))
        _end_threads_before_fork(loaded)
        return loaded
    except (CompilerError, CompilerKilled):
        raise
    except OSError as error:
        raise CompilerError(reason(error)) from error
    except AdtrainError as error:
        raise CompilerError(str(error)) from error


def describe() -> str:
    """The compiler and its version, or why there is none."""
    try:
        found = find_compiler(open_cache("cpu"))
    except AdtrainError as error:
        return str(error)
    return (found.version.splitlines() or [shlex.join(found.command)])[0]


@contextmanager
def _short_spins() -> Iterator[None]:
    """Let GNU OpenMP, which reads its settings when it is loaded, spin at a barrier for some 50 us before it sleeps.

    That is longer than the threads of a step differ. By default it waits for milliseconds, in which a thread keeps the
    one it waits for from a core that others use too.
    """
    given = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    if not given:
        os.environ["GOMP_SPINCOUNT"] = "4000"
    try:
        yield
    finally:
        if not given:
            del os.environ["GOMP_SPINCOUNT"]


def _end_threads_before_fork(library: ctypes.CDLL) -> None:
    """Let OpenMP end its threads before each fork of the process; it starts new ones when it needs them.

    A child has none of its parent's threads, yet GNU's OpenMP would wait for them in it, for ever.
    """
    if hasattr(library, "omp_pause_resource_all"):  # which OpenMP has since version 5.0
        _call_before_fork(ctypes.cast(library.omp_pause_resource_all, ctypes.c_void_p).value)


@functools.cache
def _call_before_fork(address: int) -> None:
    """Call the function at an address before each fork; registered once for all libraries."""
    pause = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(address)
    os.register_at_fork(before=lambda: pause(SOFT_PAUSE))


@dataclass(frozen=True)
class _Build:
    compiler: Compiler
    cache: Cache
    folder: Path

    def run(self, program_source: str, objects: Mapping[str, Source]) -> bytes:
        """The content of the library. Objects of kernels come from the cache, or are stored there, by key."""
        found = {key: self.cache.find(key, ".o") for key in sorted(objects)}
        missing = [key for key, path in found.items() if path is None]
        with self.cache.build_folder() as site:
            jobs = [functools.partial(self._program, site, program_source)]
            jobs += [functools.partial(self._kernel, site, key, objects[key]) for key in missing]
            with ThreadPoolExecutor(os.cpu_count()) as threads:  # threads that wait for processes
                try:
                    list(threads.map(lambda job: job(), jobs))  # where one fails, those not yet started are cancelled
                except KeyboardInterrupt:
                    end_all()
                    raise
            for key in missing:
                found[key] = self.cache.store(key, ".o", Path(site, f"{key}.o").read_bytes())
            self.compiler.run(["-shared", "-o", "library.so", "program.o", *map(str, found.values()), "-lm"], site)
            return Path(site, "library.so").read_bytes()

    def _kernel(self, site: str, key: str, source: Source) -> None:
        path = self.folder / source.file
        self.compiler.run([*source.definitions, f"-I{self.folder}", "-c", str(path), "-o", f"{key}.o"], site)

    def _program(self, site: str, source: str) -> None:
        options = [f"-I{self.folder}", "-c"]
        Path(site, "program.c").write_text(source)
        try:
            self.compiler.run([*options, "program.c"], site)
        except CompilerError as error:
            if not self.cache.lasting:
                raise
            kept = self.cache.folder / "failed.c"
            command = [*self.compiler.command, *self.compiler.flags, *options, str(kept)]
            try:
                write_atomic(kept, f"{source}\n/* {shlex.join(command)} */\n".encode())
            except AdtrainError:
                raise error from None  # which says more than that this could not be kept
            raise CompilerError(f"{error} (the source is kept in {kept})") from None
