"""C files to the content of a library: compiled in parallel, linked, in a temporary folder."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adtrain.backends.cpu.toolchain import Compiler, CompilerError, KernelError, LinkError, blocked_signals, end_all
from adtrain.cache import Cache
from adtrain.codegen.expressions import c_type
from adtrain.core.errors import AdtrainError
from adtrain.core.timeline import report_status
from adtrain.files import write_atomic

COMPILE = ("-x", "c", "-c")
"""The language is named, because a C++ compiler (g++) would compile C as C++."""

PROGRAM = ("-ffp-contract=off",)
"""Options for the C of a Program: a product and a sum of two equations are two roundings. So equal products cancel, and
a value that is computed again has the same bits. What may be contracted calls fma."""

KERNEL = ("-ffp-contract=fast",)
"""Options for the kernels: the products that they sum become fused multiply-adds."""


class Source(NamedTuple):
    """A file of `kernels/cpu`, or one with an absolute path, compiled for one or two element types, its T and U.

    Attributes:
        prototypes: of the functions that a program calls in a file of the user. The compiler compares both.
        macros: names and values of other macros.
    """

    file: str
    dtypes: tuple[np.dtype, ...]
    prototypes: tuple[str, ...] = ()
    macros: tuple[tuple[str, int], ...] = ()

    @property
    def suffix(self) -> str:
        """The suffix of its functions' names: "_float32", "_uint8_int64"."""
        return "".join(f"_{dtype.name}" for dtype in self.dtypes)

    @property
    def definitions(self) -> list[str]:
        """The compiler options for the element types and the other macros."""
        types = [f"-D{name}={c_type(dtype)}" for name, dtype in zip("TU", self.dtypes, strict=False)]
        return [*types, f"-DSUFFIX={self.suffix}", *(f"-D{name}={value}" for name, value in self.macros)]


@dataclass(frozen=True)
class Build:
    """A build of one library: its compiler, the cache of its objects, and the folder of the kernels' headers."""

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
                futures = list[Future[None]]()
                try:
                    with blocked_signals():  # so that `futures` has all jobs when Ctrl-C is delivered
                        futures += [threads.submit(job) for job in jobs]
                    report_status(f"compiling 0 of {len(futures)} files")
                    for done, future in enumerate(as_completed(futures), 1):
                        report_status(f"compiling {done} of {len(futures)} files")
                        if future.exception() is not None:
                            break
                    for future in futures:
                        future.result()
                except BaseException:
                    for future in futures:
                        future.cancel()
                    while wait(futures, 0.05).not_done:  # a compiler may be starting right now
                        end_all()
                    raise
            for key in missing:
                found[key] = self.cache.store(key, ".o", self._written(site, f"{key}.o"))
            try:
                self.compiler.run(["-shared", "-o", "library.so", "program.o", *map(str, found.values()), "-lm"], site)
            except CompilerError as error:
                raise LinkError(str(error)) from None
            return self._written(site, "library.so")

    def _written(self, site: str, name: str) -> bytes:
        try:
            return Path(site, name).read_bytes()
        except FileNotFoundError:
            raise CompilerError(f"{shlex.join(self.compiler.command)}: wrote no file; is it a C compiler?") from None

    def _kernel(self, site: str, key: str, source: Source) -> None:
        path = self.folder / source.file
        options = [*KERNEL, *source.definitions, f"-I{self.folder}", *COMPILE]
        if source.prototypes:
            Path(site, f"{key}.h").write_text("\n".join(['#include "common.h"', *source.prototypes, ""]))
            options += ["-include", f"{key}.h"]
        try:
            self.compiler.run([*options, str(path), "-o", f"{key}.o"], site)
        except CompilerError as error:
            if not os.path.isabs(source.file):
                raise
            message = str(error).removeprefix(f"{shlex.join(self.compiler.command)}: ")
            for prototype in source.prototypes:
                conflict = f"conflicting types for '{prototype.partition('(')[0].split()[-1]}'"
                if conflict in message:
                    message = f"{message.partition(conflict)[0]}{conflict}; expected {prototype} "
                    message += "An int in numbers= is an int64_t, a float is a double"
            raise KernelError(f"your kernel does not compile: {message}") from None

    def _program(self, site: str, source: str) -> None:
        options = [*PROGRAM, f"-I{self.folder}", *COMPILE]
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
