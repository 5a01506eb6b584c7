"""C sources to a loaded library, compiled in parallel and cached by content, compiler, processor and flags."""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from adtrain.assets import asset_path
from adtrain.backends.cpu.build import KERNEL, PROGRAM, Build, Source
from adtrain.backends.cpu.threads import check_setting
from adtrain.backends.cpu.toolchain import (
    CompilerError,
    CompilerKilled,
    KernelError,
    LinkError,
    find_compiler,
    processor,
)
from adtrain.cache import Cache, digest, open_cache, process_cache, reason
from adtrain.core import communicator
from adtrain.core.errors import AdtrainError
from adtrain.includes import Includes, search_folders

__all__ = ["CompilerError", "describe", "load"]

_log = logging.getLogger(__name__)

SOFT_PAUSE = 1
"""omp_pause_soft of omp.h."""

_UNDEFINED = re.compile(r"undefined symbol: (\w+)")


def load(program_source: str, kernels: Collection[Source], functions: Sequence[str]) -> ctypes.CDLL:
    """The library of a program's C text and of the kernels that it calls.

    Objects of kernels and whole libraries are kept in the user's cache, so that loading the same one again runs no
    compiler, in any process. A library of the cache that does not load is compiled anew, once. If the cache's disk is
    full, the library is compiled in a temporary folder, with a warning.

    Args:
        program_source: C11, which may include the headers of `kernels/cpu`.
        kernels: each file and element types that the program needs a function of.
        functions: the functions of the program that are called from Python.

    Raises CompilerError, one line that says what to do: no compiler, a compiler that fails, a disk that is full;
    CompilerKilled where a signal ended the compiler; KernelError where a kernel of the user does not compile or link;
    AdtrainError where OMP_NUM_THREADS is no number.
    """
    check_setting()
    if os.name != "posix":
        raise CompilerError("code is compiled on Linux and macOS only")
    cache = open_cache("cpu")
    try:
        return _load(cache, program_source, kernels, functions)
    except CompilerError as error:
        full = os.strerror(errno.ENOSPC)
        if not cache.lasting or full not in str(error):
            raise
        return _load(process_cache(f"{cache.folder}: {full}"), program_source, kernels, functions)


def _load(cache: Cache, program_source: str, kernels: Collection[Source], functions: Sequence[str]) -> ctypes.CDLL:
    """`load` with this cache."""
    try:
        folder = asset_path("kernels") / "cpu"
        compiler = find_compiler(cache)
        includes = Includes([folder, *search_folders(compiler.command[1:])])
        setting = digest(compiler.identity, *compiler.flags, *PROGRAM, *KERNEL, processor())
        objects = {_object_key(setting, folder / k.file, k, includes): k for k in kernels}
        key = digest(setting, program_source, *includes.digests(program_source), *sorted(objects))
        if cached := cache.find(key, ".so"):
            try:
                return _loaded(cached, functions)
            except OSError as error:
                _log.warning("adtrain: warning: %s; it will be rebuilt", reason(error))
                cache.remove(key, ".so")
                for object_key in objects:
                    cache.remove(object_key, ".o")
        reused = [object_key for object_key in objects if cache.find(object_key, ".o") is not None]
        build = partial(Build(compiler, cache, folder).run, program_source, objects)
        try:
            try:
                return _built(cache, key, build, functions)
            except (LinkError, OSError) as error:
                if not reused:
                    raise
                _log.warning("adtrain: warning: %s; the kernels in the cache will be rebuilt", error)
                for object_key in reused:  # one of them has other code
                    cache.remove(object_key, ".o")
                return _built(cache, key, build, functions)
        except OSError as error:
            undefined = _UNDEFINED.search(str(error))
            if undefined and any(os.path.isabs(k.file) for k in kernels):
                raise KernelError(
                    f"your kernel does not link: {undefined[1]} is not defined; expected void FN(NAME)(...), where "
                    "NAME is the operation's name, and static functions beside it"
                ) from None
            raise
    except (CompilerError, CompilerKilled, KernelError):
        raise
    except OSError as error:
        raise CompilerError(reason(error)) from error
    except AdtrainError as error:
        raise CompilerError(str(error)) from error


def _built(cache: Cache, key: str, build: Callable[[], bytes], functions: Sequence[str]) -> ctypes.CDLL:
    """The library that `build` makes, kept under the key. One that does not load, an OSError, is not kept."""
    with cache.locked(key) if communicator.current().size > 1 else nullcontext():
        library = cache.find(key, ".so")  # another rank may have compiled it meanwhile
        if library is None:
            library = cache.store(key, ".so", build())
    cache.prune()
    try:
        return _loaded(library, functions)
    except OSError:
        cache.remove(key, ".so")
        raise


def _object_key(setting: str, path: Path, kernel: Source, includes: Includes) -> str:
    """The cache key of a kernel's object: a digest of all that it depends on."""
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    return digest(setting, text, *kernel.definitions, *kernel.prototypes, *includes.digests(text, path.parent))


def _loaded(path: Path, functions: Sequence[str]) -> ctypes.CDLL:
    """The library in the file. Raises OSError where it does not load or lacks one of the functions."""
    with _short_spins():
        library = ctypes.CDLL(str(path))
    for name in functions:
        if not hasattr(library, name):
            raise OSError(f"{path}: does not have the function {name}")
    _end_threads_before_fork(library)
    return library


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

    That is longer than the threads of a step differ. By default it spins for milliseconds. Where other programs use the
    cores too, the thread that it waits for then gets no core.
    """
    given = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    if not given:
        os.environ["GOMP_SPINCOUNT"] = "4000"
    try:
        yield
    finally:
        if not given:
            os.environ.pop("GOMP_SPINCOUNT", None)  # another thread may have loaded a library meanwhile


def _end_threads_before_fork(library: ctypes.CDLL) -> None:
    """Let OpenMP end its threads before each fork of the process; it starts new ones when it needs them.

    A child has none of its parent's threads, and GNU's OpenMP would wait for them for ever.
    """
    if hasattr(library, "omp_pause_resource_all"):  # which OpenMP has since version 5.0
        _call_before_fork(ctypes.cast(library.omp_pause_resource_all, ctypes.c_void_p).value)


@functools.cache
def _call_before_fork(address: int) -> None:
    """Call the function at an address before each fork; registered once for all libraries."""
    pause = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(address)
    os.register_at_fork(before=lambda: pause(SOFT_PAUSE))
