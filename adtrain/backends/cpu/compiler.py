"""C sources to a loaded library, compiled in parallel and cached by content, compiler, processor and flags.

First: how the C compiler of this machine is found and called, and its errors.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adtrain.backends.cpu.threads import check_setting
from adtrain.cache import Cache, Includes, digest, open_cache, process_cache, reason, search_folders
from adtrain.codegen.elementwise import c_type
from adtrain.core import communicator
from adtrain.core.errors import AdtrainError
from adtrain.core.timeline import report_status
from adtrain.files import asset_path, write_atomic

NAMES = ("cc", "gcc", "clang")
# NaN and infinities behave as in NumPy. Only errno and floating-point traps, which Python never sees, are given up.
# gcc 12 may take a store through an argument for an access of NULL, and then deletes the calls of its function as
# without effect; -fno-delete-null-pointer-checks prevents that.
FLAGS = (
    "-O3", "-fopenmp", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fwrapv", "-fno-delete-null-pointer-checks",
    "-std=gnu11",
)  # fmt: skip
# The option for all instructions of this processor, by architecture; none for others, where spellings vary.
NATIVE = {"x86_64": "-march=native", "i686": "-march=native", "aarch64": "-mcpu=native", "arm64": "-mcpu=native"}
# The lines of /proc/cpuinfo that tell which instructions a processor has, on x86 and on ARM.
_PROCESSOR_LINES = ("model name", "flags", "CPU implementer", "CPU part", "CPU variant", "Features")
SHORTAGES = (
    *map(os.strerror, (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)),
    "virtual memory exhausted",
    "signal terminated program",  # gcc's words for the end of cc1, also by a stack that is too small
)
ADVICE = "end other processes or raise their limit (ulimit -u, -v, -n, -s), and run it again"

MAX_MESSAGES = 4 << 20
"""Bytes of messages, after which a compiler is ended."""

START_SECONDS = 10.0
"""Maximum seconds that `end_all` waits for compilers that other threads are starting."""

_running: set[subprocess.Popen[bytes]] = set()
_starting: set[int] = set()
"""The threads that are starting a compiler."""
_TELLING = re.compile(r"error:|undefined reference|multiple definition|cannot|No space left", re.IGNORECASE)


class CompilerError(AdtrainError):
    """Compilation failed: the compiler is missing or failed, or the disk is full. NumPy takes over."""


class LinkError(CompilerError):
    """Compiled files cannot be linked."""


class KernelError(AdtrainError):
    """A kernel of the user does not compile or link. NumPy does not take over, as it may compute something else."""


class CompilerKilled(AdtrainError):
    """A signal, or a lack of processes or memory, ended the compiler; it may work the next time.

    The run ends: NumPy would go on with other bytes than compiled code.
    """


@dataclass(frozen=True)
class Compiler:
    """A C compiler. Made by `find_compiler`.

    Attributes:
        command: the words that call it.
        files: the programs behind it.
        version: what it says of itself.
    """

    command: tuple[str, ...]
    files: tuple[str, ...]
    version: str

    @property
    def identity(self) -> str:
        """Changes when the compiler does."""
        return "\n".join([*self.command, *self.files, self.version])

    @property
    def flags(self) -> tuple[str, ...]:
        """The options of all calls."""
        native = NATIVE.get(platform.machine())
        return (*FLAGS, native) if native else FLAGS

    def run(self, arguments: Sequence[str], folder: str) -> None:
        """Call it in a folder, which takes its temporary files too.

        Raises:
            CompilerError: it failed; with its first error message.
            CompilerKilled: a signal ended it, or processes or memory are short.
        """
        done = _run([*self.command, *self.flags, *arguments], folder)
        if done.returncode < 0:
            name = signal.Signals(-done.returncode).name
            raise CompilerKilled(f"{shlex.join(self.command)}: ended by {name}; is there enough memory? Run it again")
        if done.returncode:
            line = _first_error(done).replace(f"{folder}/", "")  # a folder for this once
            if any(shortage in line for shortage in SHORTAGES):
                raise CompilerKilled(f"{shlex.join(self.command)}: {line}; {ADVICE}")
            raise CompilerError(f"{shlex.join(self.command)}: {line}")


def find_compiler(cache: Cache) -> Compiler:
    """The compiler that the environment variable CC names, else the first of NAMES that is installed.

    Raises CompilerError where there is none.
    """
    chosen = os.environ.get("CC", "").strip()
    try:
        words = shlex.split(chosen) or [name for name in NAMES if shutil.which(name)][:1]
    except ValueError as error:
        raise CompilerError(f"CC={chosen}: {error}") from None
    if not words:
        raise CompilerError("no C compiler (cc, gcc or clang) found; install one, e.g. apt install gcc")
    program = shutil.which(words[0])
    if program is None:
        raise CompilerError(f"CC={chosen}: no such program")
    # Absolute, as it runs in another folder. The files include the program that a launcher such as ccache runs.
    command = (os.path.abspath(program), *words[1:])
    files = tuple(os.path.realpath(file) for word in words if (file := shutil.which(word)))
    return Compiler(command, files, _version(command, files, cache))


def _version(command: Sequence[str], files: Sequence[str], cache: Cache) -> str:
    """The output of --version, cached by the state of the compiler's files, as it takes a process."""
    states = [(status.st_mtime_ns, status.st_size) for status in map(os.stat, files)]
    key = digest("version", *command, *files, str(states))
    if known := cache.find(key, ".txt"):
        return known.read_text(encoding="utf-8", errors="replace")
    done = _run([*command, "--version"], str(cache.folder))
    if done.returncode == 0:
        with suppress(AdtrainError):  # a full disk: the version is known all the same
            cache.store(key, ".txt", done.stdout.encode())
    return done.stdout


def processor() -> str:
    """A text that differs for processors that cannot run each other's code."""
    found = [platform.machine()]
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            # Only the first processor: its lines end at a blank one, and reading all takes long on a large machine.
            for line in iter(lines.readline, "\n"):
                if line.startswith(_PROCESSOR_LINES):
                    found.append(line)
                elif not line:
                    break
    except OSError:
        found.append(platform.node())  # a home folder may be shared between machines
    return "".join(found)


def _run(command: Sequence[str], folder: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end. All messages, in English, are in stdout.

    The command has a session of its own, so that Ctrl-C, which signals a whole process group, does not end it.
    """
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": folder}
    _starting.add(threading.get_ident())
    with ExitStack() as blocked:
        blocked.enter_context(blocked_signals())
        try:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            _running.add(process)
        except OSError as error:
            message = f"{command[0]}: cannot be run ({error.strerror})"
            if error.strerror in SHORTAGES:
                raise CompilerKilled(f"{message}; {ADVICE}") from error
            raise CompilerError(message) from error
        finally:
            _starting.discard(threading.get_ident())
        with process:
            try:
                blocked.close()  # delivers a signal that has come
                messages = _messages(process, command[0])
            except BaseException:
                end_all()
                raise
            finally:
                process.wait()
                _running.discard(process)
    return subprocess.CompletedProcess(process.args, process.returncode, messages)


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Block the signals that may come to a whole process group, in this thread and in what it starts.

    Until a process has a session of its own, they would end it. A signal that comes meanwhile is delivered afterwards.
    """
    if os.name != "posix":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _messages(process: subprocess.Popen[bytes], program: str) -> str:
    """What the process prints until its end. Raises CompilerError where it prints more than MAX_MESSAGES."""
    assert process.stdout is not None
    found = bytearray()
    while chunk := os.read(process.stdout.fileno(), 1 << 16):
        found += chunk
        if len(found) > MAX_MESSAGES:
            _end(process)
            raise CompilerError(f"{program}: ended, as it printed more than {MAX_MESSAGES >> 20} MiB")
    return found.decode(errors="replace")


def end_all() -> None:
    """End all compilers that run or that other threads are starting, with the processes that they started."""
    deadline = time.monotonic() + START_SECONDS
    while _starting - {threading.get_ident()} and time.monotonic() < deadline:
        time.sleep(0.001)
    for process in list(_running):
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _first_error(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    telling = [line for line in lines if _TELLING.search(line)]
    return (telling or lines or [f"ended with exit status {done.returncode}"])[0]


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
