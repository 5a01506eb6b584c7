"""The C compiler of this machine: how it is found and called, and its errors."""

from __future__ import annotations

import errno
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from adtrain.cache import Cache, digest
from adtrain.core.errors import AdtrainError

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
