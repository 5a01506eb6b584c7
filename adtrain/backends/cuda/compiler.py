"""CUDA C++ to cubins by NVRTC, cached by source, included headers, options, version and architecture.

Threads take the largest source that waits, and let a process compile it. If a process fails, this one compiles its
source. Nothing here needs a GPU.
"""

from __future__ import annotations

import atexit
import functools
import heapq
import itertools
import logging
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock, Thread, main_thread
from typing import NamedTuple, TypeVar

import numpy as np

from adtrain.backends.cuda import nvrtc
from adtrain.backends.cuda.nvrtc import Nvrtc, NvrtcError, Request
from adtrain.cache import Includes, digest, included_names, open_cache
from adtrain.child_process import end, started
from adtrain.codegen.elementwise import c_type
from adtrain.core.errors import AdtrainError, DeviceError, DeviceFault, OutOfMemory
from adtrain.core.kernel import MemoryLayout
from adtrain.core.timeline import report_status
from adtrain.files import asset_path

MAX_PROCESSES = 16
"""Maximum processes that compile, this one included."""


class CompileQueue:
    """Runs functions in as many threads as there are processors. A thread ends when no function waits."""

    def __init__(self) -> None:
        self.most = os.cpu_count() or 1
        self.lock, self.numbers = Lock(), itertools.count()
        self.waiting: list[tuple[int, int, Future[None], Callable[[], None]]] = []
        self.threads = 0

    def submit(self, size: int, function: Callable[[], None]) -> Future[None]:
        """Call a function when a thread is free. Functions of larger `size` come first."""
        future = Future[None]()
        with self.lock:
            heapq.heappush(self.waiting, (-size, next(self.numbers), future, function))
            if start := self.threads < self.most:
                self.threads += 1
        if start:
            Thread(target=self._run).start()
        return future

    def _run(self) -> None:
        # At the end of the process the main thread ends first; then the results are not needed.
        while main_thread().is_alive():
            with self.lock:
                if not self.waiting:
                    self.threads -= 1
                    return
                *_, future, function = heapq.heappop(self.waiting)
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)


class CompileProcesses:
    """Up to one process for each processor. One is started when a source comes while all others compile."""

    def __init__(self, library: Nvrtc) -> None:
        self.library = library
        self.max_started = min(os.cpu_count() or 1, MAX_PROCESSES) - 1
        self.here, self.lock = Lock(), Lock()
        self.idle: list[subprocess.Popen[bytes]] = []
        self.started = 0
        atexit.register(self.close)

    def compile(self, request: Request) -> tuple[bytes | None, str]:
        """`Nvrtc.compile`, in this process if it is idle, otherwise in another one.

        It waits for this process if no other one can be used.
        """
        if self.here.acquire(blocking=False):
            try:
                return self.library.compile(*request)
            finally:
                self.here.release()
        process = self._take()
        if process is not None:
            with suppress(OSError, EOFError, pickle.UnpicklingError):
                assert process.stdin is not None
                assert process.stdout is not None
                pickle.dump(request, process.stdin)
                process.stdin.flush()
                found: tuple[bytes | None, str] = pickle.load(process.stdout)
                with self.lock:
                    self.idle.append(process)
                return found
            end(process)
        with self.here:
            return self.library.compile(*request)

    def _take(self) -> subprocess.Popen[bytes] | None:
        """An idle process, or a new one; None if all are busy and no more can be started."""
        with self.lock:
            if self.idle:
                return self.idle.pop()
            if self.started >= self.max_started:
                return None
            self.started += 1
        # Without the module `site`, because only the standard library is imported.
        try:
            return started([sys.executable, "-I", "-S", nvrtc.__file__, self.library.path])
        except OSError:
            return None

    def close(self) -> None:
        """End the processes that are idle."""
        with self.lock:
            ending, self.idle = self.idle, []
        end(*ending)


KERNEL = re.compile(r"^KERNEL(?=(?:\s+(?:__\w+__\((?:[^()]|\([^()]*\))*\)|[A-Z_]+))*\s+(\w+)\()", re.MULTILINE)
"""The word KERNEL of a kernel's definition. Launch bounds, macros and the name follow; the group is the name."""

NOT_COMPILED = "template <int> __global__ void"
"""Replaces the word KERNEL of a kernel that a launch does not need: a template that nothing instantiates."""

PROTOTYPE = re.compile(r'^extern "C" __global__ (void .*;)$', re.MULTILINE)
"""The prototype of a user's kernel, before its file's text."""

FLAGS = ("--std=c++17", "--minimal", "--ptxas-options=-v")
"""`--minimal` omits NVRTC's declarations of textures and surfaces, which take a third of its front end's time."""


T = TypeVar("T")

_log = logging.getLogger(__name__)

_queue = CompileQueue()
_begun: dict[str, Future[None]] = {}
"""The compilations that have begun, by the key of their cubin."""
_lock = Lock()


class CudaCompilerError(AdtrainError):
    """NVRTC is missing, or reports an error in a source."""


class Source(NamedTuple):
    """A translation unit: its name in messages, its text, and the options it is compiled with."""

    name: str
    text: str
    options: tuple[str, ...] = ()


class Compiled(NamedTuple):
    """A cubin and what the assembler reports of its kernels: registers, stack frames, spills."""

    cubin: bytes
    log: str


def architecture(capability: tuple[int, int]) -> str:
    """The architecture to compile for: "90a" adds wgmma and other instructions to "90"."""
    major, minor = capability
    return f"{major}{minor}{'a' if (major, minor) == (9, 0) else ''}"


def file_source(
    file: str, dtypes: tuple[np.dtype, ...], definitions: tuple[tuple[str, int], ...], *memory: int
) -> Source:
    """A file of `kernels/cuda`, or one with an absolute path, for the element types T and U and with macros.

    Launches that name the same layouts in another order have the same source.
    """
    macros = tuple(f"-D{name}={value}" for name, value in definitions)
    places = "".join(sorted({layout.macros for layout in memory if isinstance(layout, MemoryLayout)}))
    if os.path.isabs(file):  # a user may edit it while the process runs
        return _source(file, Path(file).read_text(encoding="utf-8", errors="replace"), dtypes, macros, places)
    return _source(file, _kernel_text(file), dtypes, macros, places)


@functools.cache
def _kernel_text(file: str) -> str:
    return (asset_path("kernels") / "cuda" / file).read_text(encoding="utf-8")


@functools.lru_cache(4096)
def _source(file: str, text: str, dtypes: tuple[np.dtype, ...], macros: tuple[str, ...], places: str) -> Source:
    # T and U are defined in the text, after NVRTC's own headers, which use these letters as template parameters.
    types = [f"#define {name} {c_type(dtype)}\n" for name, dtype in zip("TU", dtypes, strict=False)]
    return Source(file, "".join(types) + places + f'#line 1 "{file}"\n{text}', macros)


@functools.cache
def of_kernel(source: Source, name: str) -> Source:
    """The source for one of its kernels. The others take no time."""
    text = KERNEL.sub(lambda found: "KERNEL" if found[1] == name else NOT_COMPILED, source.text)
    return source._replace(text=text)


def cubin(source: Source, target: str) -> bytes:
    """The cubin of ``source`` for an architecture, from the user's cache if it was compiled before.

    Raises:
        CudaCompilerError: NVRTC is missing, or refuses the source.
    """
    key = fingerprint(source, target)
    with _lock:
        compilation = _begun.get(key)
    while compilation is not None and not compilation.done():
        report_status(f"compiling {sum(each.done() for each in _begun.values())} of {len(_begun)} kernels")
        wait([compilation], 0.1)
    cache = open_cache("cuda")
    found = cache.content(key, ".cubin")
    if found is not None:
        return bytes(found)
    compiled = compile_source(source, target).cubin
    cache.store(key, ".cubin", compiled)
    return compiled


def load_cubin(source: Source, target: str, load: Callable[[bytes], T]) -> T:
    """`load` of the cubin. One from the cache that does not load is deleted and compiled anew, once.

    Raises:
        CudaCompilerError: as `cubin` does.
        DeviceError: the new cubin does not load either.
    """
    try:
        return load(cubin(source, target))
    except (DeviceFault, OutOfMemory):
        raise
    except DeviceError as error:
        problem = f"the cached code of {source.name} does not load ({error})"
        _log.warning("adtrain: warning: %s; it will be rebuilt", problem)
        open_cache("cuda").remove(fingerprint(source, target), ".cubin")
        return load(cubin(source, target))


def begin(sources: Iterable[Source], target: str) -> Sequence[Future[None]]:
    """Begin to compile the sources that are not in the cache, in parallel; returns their compilations.

    A source that is being compiled already has its compilation. `cubin` raises the errors later.
    """
    longest_first = sorted(sources, key=lambda source: -len(source.text))
    return [found for source in longest_first if (found := _compilation(source, target)) is not None]


def _compilation(source: Source, target: str) -> Future[None] | None:
    try:
        key = fingerprint(source, target)
    except CudaCompilerError:
        return None
    with _lock:
        found = _begun.get(key)
        if found is None and open_cache("cuda").find(key, ".cubin") is None:
            found = _begun[key] = _queue.submit(len(source.text), partial(_compile_into_cache, source, target, key))
    return found


def _compile_into_cache(source: Source, target: str, key: str) -> None:
    with suppress(AdtrainError):
        open_cache("cuda").store(key, ".cubin", compile_source(source, target).cubin)


def compile_all(sources: Iterable[Source], target: str) -> Iterator[None]:
    """Compile the sources into the cache, in parallel. Yields after each one. `cubin` raises the errors later."""
    for compilation in begin(sources, target):
        yield compilation.result()


def fingerprint(source: Source, target: str) -> str:
    """The cache key of the cubin: a digest of everything that it depends on.

    Raises:
        CudaCompilerError: NVRTC is missing.
    """
    headers = [word for name, text in included(source) for word in (name, _text_digest(text))]
    if (folder := _users_folder(source)) is not None:
        headers += Includes().digests(source.text, folder)
    return digest(version(), target, *FLAGS, *source.options, *headers, source.text)


def included(source: Source) -> list[tuple[str, str]]:
    """Name and text of each header of `kernels/cuda` that a source may include, directly or indirectly, by name.

    NVRTC itself reads the headers of a user, as a C compiler does.
    """
    headers, found = dict(_headers()), dict[str, str]()
    texts = [source.text]
    if (folder := _users_folder(source)) is not None:
        texts += [path.read_text(errors="replace") for path in Includes().files(source.text, folder)]
    while texts:
        for name in included_names(texts.pop()):
            if name in headers and name not in found:
                found[name] = headers[name]
                texts.append(headers[name])
    return sorted(found.items())


def _users_folder(source: Source) -> Path | None:
    """The folder of a user's source; None for one of `kernels/cuda`."""
    return Path(source.name).parent if os.path.isabs(source.name) else None


_text_digest = functools.cache(digest)


def compile_source(source: Source, target: str) -> Compiled:
    """Compile ``source`` for an architecture ("90a"), without the cache.

    Raises:
        CudaCompilerError: with NVRTC's first error.
    """
    options = [f"--gpu-architecture=sm_{target}", *FLAGS, *source.options]
    if (folder := _users_folder(source)) is not None:
        options.append(f"-I{folder}")
    try:
        code, log = _processes().compile((source.text, source.name, included(source), options))
    except NvrtcError as error:
        raise CudaCompilerError(f"NVRTC: {error}") from None
    if code is None:
        errors = [line for line in log.splitlines() if "error" in line] or log.splitlines()[:1]
        if 'has "C" linkage' in errors[0] and (prototype := PROTOTYPE.search(source.text)):
            errors[0] += f"; expected {prototype[1]}"
        options_text = " ".join((f"sm_{target}", *source.options))
        raise CudaCompilerError(f"{source.name} does not compile ({options_text}): {'; '.join(errors[:1])}")
    return Compiled(code, log)


@functools.cache
def version() -> str:
    """NVRTC's version, "13.0"."""
    return _nvrtc().version()


@functools.cache
def _headers() -> tuple[tuple[str, str], ...]:
    """Name ("gemm/tile.cuh") and text of each header in `kernels/cuda`."""
    root = asset_path("kernels") / "cuda"
    return tuple(
        (path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.cuh"))
    )


@functools.cache
def _processes() -> CompileProcesses:
    return CompileProcesses(_nvrtc())


@functools.cache
def _nvrtc() -> Nvrtc:
    """The newest NVRTC of a wheel, else the one that `cuda.pathfinder` finds."""
    wheels = [path for folder in sys.path for path in Path(folder).glob("nvidia/*/lib/libnvrtc.so.*")]
    try:
        if wheels:
            return Nvrtc(str(max(wheels, key=lambda path: int(path.name.split(".")[2]))))
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return Nvrtc(str(load_nvidia_dynamic_lib("nvrtc").abs_path))
    except Exception as error:  # cuda.pathfinder raises RuntimeError, OSError or its own
        raise CudaCompilerError(f"NVRTC cannot be loaded ({error}): pip install 'adtrain[gpu]'") from None
